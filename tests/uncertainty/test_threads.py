"""The state of a draw belongs to its call: threads and tasks that use one model do not affect each other."""

import asyncio
import contextvars
import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from shared_models import Twice
from small_models import convnet, mlp, widen
from torch import nn

import svdcompress as svdc
from svdcompress.layers import stochastic_layers
from svdcompress.uncertainty import mc_predict, mean_predict

THREADS, CALLS = 8, 200


@pytest.fixture(autouse=True)
def switching():
    """Makes threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


MODELS = {
    "mlp": (lambda: mlp(4, 6, 3), (5, 4)),
    "convnet": (convnet, (3, 1, 8, 8)),
    "twice": (Twice, (4, 6)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)), (5, 4)),
}


def made(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = svdc.convert_dropout(svdc.convert(make())) if name == "dropout" else svdc.convert(make())
    return widen(model).eval(), torch.randn(shape, generator=torch.Generator().manual_seed(3))


def in_threads(work, count=THREADS):
    """The results of `work(i)` in `count` threads that start together."""
    start = threading.Barrier(count)

    def run(i):
        torch.set_num_threads(1)
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def everything(module):
    """Everything stored in a model's modules, by identity."""
    return {
        name: (part.training, {key: _plain(value) for key, value in vars(part).items()})
        for name, part in module.named_modules()
    }


def _plain(value):
    return {key: id(item) for key, item in value.items()} if isinstance(value, dict) else id(value)


WAYS = [{}, {"members": True}, {"local": True}, {"antithetic": True}, {"chunk": 7}]


def predict(model, x, seed):
    got = mc_predict(model, x, 4, generator=torch.Generator().manual_seed(seed), **WAYS[seed % len(WAYS)])
    return got.mean, got.variance


@pytest.mark.parametrize(
    ("name", "calls"),
    [("mlp", 20), ("twice", 20), *(pytest.param(name, CALLS, marks=pytest.mark.slow) for name in MODELS)],
)
def test_threads_give_what_one_gives(name, calls):
    model, x = made(name)
    before = everything(model)
    serial = [[predict(model, x, 1000 * i + k) for k in range(calls)] for i in range(THREADS)]
    exact = model(x)
    stop, wrong = threading.Event(), []

    def alone():
        while not stop.is_set():
            if not torch.equal(model(x), exact):
                wrong.append("model(x) was noisy")

    def sampled():
        while not stop.is_set():
            with torch.no_grad(), svdc.sampling(model, generator=torch.Generator().manual_seed(0)):
                one = model(x)
            if torch.equal(one, exact):
                wrong.append("sampling was not noisy")

    beside = [threading.Thread(target=work) for work in (alone, sampled)]
    for thread in beside:
        thread.start()
    got = in_threads(lambda i: [predict(model, x, 1000 * i + k) for k in range(calls)])
    stop.set()
    for thread in beside:
        thread.join()
    assert not wrong
    for ours, theirs in zip(got, serial, strict=True):
        assert all(torch.equal(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    assert everything(model) == before


def test_moments_trace_beside_other_calls():
    model, x = made("mlp")
    x = x.double()
    model = model.double()
    want, exact = mc_predict(model, x, 10, task="regression", method="moments"), model(x)

    def work(i):
        for _ in range(20):
            if i % 2:
                assert torch.equal(model(x), exact) and isinstance(model[0].weight, nn.Parameter)
            else:
                assert torch.equal(mc_predict(model, x, 10, task="regression", method="moments").mean, want.mean)
        return True

    assert all(in_threads(work))
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_sampling_in_threads_gives_what_one_gives():
    model, x = made("twice")

    def work(i):
        with torch.no_grad(), svdc.sampling(model, generator=torch.Generator().manual_seed(i), members=i % 3 == 1):
            return torch.stack([model(x) for _ in range(30)])

    serial = [work(i) for i in range(THREADS)]
    before = everything(model)
    assert all(torch.equal(a, b) for a, b in zip(in_threads(work), serial, strict=True))
    assert everything(model) == before


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bad = nn.Linear(4, 3), False

    def forward(self, x):
        y = self.linear(x)
        if self.bad:
            raise ZeroDivisionError("half-way")
        return y


@pytest.mark.parametrize("training", [False, True])
def test_nothing_stays_behind_an_exception(training):
    model, x = widen(svdc.convert(Fails())).train(training), torch.randn(5, 4)
    before = everything(model)
    model.bad = True
    for call in (mc_predict, mean_predict):
        with pytest.raises(ZeroDivisionError):
            call(model, x)
    with pytest.raises(ZeroDivisionError), svdc.sampling(model):
        model(x)
    with svdc.sampling(model) as sampler:
        with pytest.raises(ZeroDivisionError):
            model(x)
        model.bad = False
        assert sampler.outermost is None and not torch.equal(model(x), model(x))
    assert {name: part for name, part in everything(model).items() if name} == {n: p for n, p in before.items() if n}
    assert model.training is training and model.linear.sampler is None
    assert torch.equal(model.eval()(x), model(x)) and not model._forward_hooks and not model._forward_pre_hooks


def test_the_memory_of_a_draw_goes_with_it():
    model, x = made("convnet")
    mc_predict(model, x, 20)
    with torch.no_grad(), svdc.sampling(model) as sampler:
        model(x)
        assert not sampler.noises  # gone after the call
    assert all(not vars(layer).keys() & {"sampler", "_own", "_cache"} for layer in stochastic_layers(model))


def test_a_model_in_eval_is_not_written_to(monkeypatch):
    model, x = made("convnet")
    for kind in {type(part) for part in model.modules()}:
        monkeypatch.setattr(kind, "__setattr__", lambda *args: pytest.fail(f"{args[1]} is set"))
        monkeypatch.setattr(kind, "train", lambda *args: pytest.fail("the mode is set"))
    mc_predict(model, x, 6)
    mean_predict(model, x)


def test_a_model_in_training_comes_back_to_it_when_the_last_is_done():
    model = made("mlp")[0].train()
    model[2].eval()
    x = torch.randn(5, 4)
    serial = [predict(copy.deepcopy(model), x, k) for k in range(40)]
    got = in_threads(lambda i: [predict(model, x, k) for k in range(40)], 4)
    for ours in got:
        assert all(torch.equal(one[0], other[0]) for one, other in zip(ours, serial, strict=True))
    assert model.training and model[0].training and not model[2].training


def test_tasks_of_asyncio():
    model, x = made("mlp")
    exact = model(x)

    async def noisy():
        for _ in range(20):
            with torch.no_grad(), svdc.sampling(model):
                one = model(x)
                await asyncio.sleep(0)
                assert not torch.equal(model(x), one)
                assert not torch.equal(await asyncio.to_thread(model, x), exact)  # it copies the context

    async def quiet():
        for _ in range(60):
            assert torch.equal(model(x), exact)
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(noisy(), quiet(), noisy(), quiet())

    with torch.no_grad():
        asyncio.run(both())


def test_a_thread_that_is_given_the_context_draws():
    model, x = made("mlp")
    exact = model(x)
    with torch.no_grad(), svdc.sampling(model), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model, x).result(), exact)
        assert not torch.equal(pool.submit(contextvars.copy_context().run, model, x).result(), exact)


def test_mc_predict_within_sampling_is_by_itself():
    for name in MODELS:
        model, x = made(name)
        want = predict(model, x, 6)
        with svdc.sampling(model), torch.no_grad():
            got = predict(model, x, 6)
            assert not torch.equal(model(x), model(x))
        assert torch.equal(got[0], want[0]), name
