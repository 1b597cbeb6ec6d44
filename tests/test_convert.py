"""Conversion: what is converted and why not, weights bit for bit, tied weights, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import svdcompress as svdc
from svdcompress.errors import ModelError
from svdcompress.layers import VariationalConv2d, VariationalLayer, VariationalLinear, variational_layers

DENSE = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1), (3, 4, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding="valid"), (3, 4, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), (3, 2, 5, 5, 5)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (3, 4, 8)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (3, 4, 5, 5)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (3, 2, 4, 4, 4)),
}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def reasons(model, **patterns) -> dict[str, str]:
    return {entry.name: entry.reason for entry in svdc.plan(model, **patterns)}


# Weights, modes, and the way back


@pytest.mark.parametrize("kind", DENSE)
def test_weights_are_kept_bit_for_bit_there_and_back(kind):
    torch.manual_seed(0)
    make, shape = DENSE[kind]
    dense = nn.Sequential(make())
    state = copy.deepcopy(dense.state_dict())
    x = torch.randn(shape)
    expected = dense(x)
    layer, weight = dense[0], dense[0].weight

    assert svdc.convert(dense, log_sigma2=-40.0) is dense
    assert dense[0] is layer and layer.weight is weight and isinstance(layer, VariationalLayer)
    assert torch.equal(layer.weight, state["0.weight"]) and torch.equal(layer.bias, state["0.bias"])
    assert torch.equal(layer.log_sigma2, torch.full_like(weight, -40.0)) and layer.log_sigma2.requires_grad
    torch.testing.assert_close(dense.eval()(x), expected)

    assert svdc.to_dense(dense) is dense
    assert type(dense[0]) is type(make()) and dense[0] is layer and layer.weight is weight
    assert {name: value.tolist() for name, value in dense.state_dict().items()} == {n: v.tolist() for n, v in state.items()}


def test_to_dense_puts_irrelevant_weights_at_zero_and_leaves_nothing_variational_behind():
    model = svdc.convert(mlp())
    before = set(vars(mlp()[0])) | set(dict(mlp()[0].named_parameters()))
    with torch.no_grad():
        model[0].log_sigma2[:, :2] = 20.0
    expected = model.eval()(x := torch.randn(5, 6))
    svdc.to_dense(model)
    assert torch.equal(model(x), expected)
    assert not model[0].weight[:, :2].any() and model[0].weight[:, 2:].all()
    assert set(vars(model[0])) | set(dict(model[0].named_parameters())) == before
    assert not list(model[0].named_buffers())


def test_mode_hooks_dtype_and_frozen_weights_stay():
    model = mlp().double().eval()
    model[0].weight.requires_grad_(False)
    calls = []
    model[0].register_forward_hook(lambda *args: calls.append(1))
    svdc.convert(model)
    model(torch.randn(2, 6, dtype=torch.float64))
    assert calls == [1] and not model[0].training
    assert model[0].log_sigma2.dtype == torch.float64
    assert not model[0].log_sigma2.requires_grad and model[3].log_sigma2.requires_grad


def test_a_model_that_is_itself_a_layer_is_converted():
    layer = nn.Linear(3, 2)
    assert svdc.plan(layer)[0].converted
    assert type(svdc.convert(layer)) is VariationalLinear


def test_options_reach_every_layer():
    model = svdc.convert(mlp(), prior="log-uniform", share=["weight", "input"], threshold={"input": 5}, log_sigma2=-12)
    for _, layer in variational_layers(model):
        assert (layer.prior, layer.share) == ("log-uniform", {"weight": 0.5, "input": 0.5})
        assert (layer.threshold["weight"], layer.threshold["input"]) == (3.0, 5.0)
        assert float(layer.log_sigma2.detach().max()) == -12


# The plan, and each reason for leaving a layer


def test_the_plan_is_what_convert_does_and_touches_nothing():
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    planned = svdc.plan(model, exclude=["4"])
    assert [(e.name, e.kind, e.converted, e.parameters) for e in planned] == [
        ("0", "Embedding", False, 30),
        ("1", "Linear", True, 36),
        ("2", "LayerNorm", False, 6),
        ("4", "Linear", False, 12),
    ]
    assert planned[1].reason == "" and not list(variational_layers(model))
    svdc.convert(model, exclude=["4"])
    assert [name for name, _ in variational_layers(model)] == [e.name for e in planned if e.converted]


def test_reason_not_a_type_we_know():
    class Own(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))

    model = nn.Sequential(Own(3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    assert reasons(model)["0"] == "not a type that is converted: Own"
    assert reasons(model)["1"] == "not a type that is converted: BatchNorm1d"
    assert type(svdc.convert(model)[0]) is Own


def test_reason_excluded():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    assert reasons(model, include=["[01]"], exclude=["1"]) == {
        "0": "",
        "1": "excluded",
        "2": "excluded: no include pattern matches",
    }


@pytest.mark.parametrize("pattern", ["encoder", "enc*", "encoder.*", "encoder.[02]"])
def test_a_pattern_of_a_container_means_what_is_inside(pattern):
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3)))})
    model["head"], model["encoders"] = nn.Linear(3, 1), nn.Linear(3, 1)
    inside = {"encoder.0", "encoder.2.0"} | ({"encoders"} if pattern == "enc*" else set())
    names = {"encoder.0", "encoder.2.0", "head", "encoders"}
    assert {name for name, why in reasons(model, exclude=[pattern]).items() if why} == inside
    assert {name for name, why in reasons(model, include=[pattern]).items() if why} == names - inside
    assert {name for name, _ in variational_layers(svdc.convert(model, exclude=[pattern]))} == names - inside


def test_reason_already_converted():
    model = svdc.convert(mlp(), include=["0"])
    with torch.no_grad():
        model[0].log_sigma2.fill_(-3.0)
    assert reasons(model)["0"] == "already converted"
    svdc.convert(model)
    assert float(model[0].log_sigma2.detach().mean()) == -3.0 and isinstance(model[3], VariationalLinear)
    svdc.convert(model)  # nothing left to do is not an error


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (weight_norm, "weight-normed"),
        (nn.utils.spectral_norm, "weight-normed"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight-normed or pruned"),
        (parametrizations.weight_norm, "parametrized"),
        (parametrizations.spectral_norm, "parametrized"),
    ],
)
def test_reason_weight_normed_or_parametrised(change, reason):
    model = nn.Sequential(change(nn.Linear(4, 4)), nn.Linear(4, 2))
    found = reasons(model)
    assert found["0"].startswith(reason) and found["1"] == ""
    x = torch.randn(2, 4)
    expected = model.eval()[0](x)
    svdc.convert(model)
    torch.testing.assert_close(model[0](x), expected)
    assert [name for name, _ in variational_layers(model)] == ["1"]


def test_reason_inside_multihead_attention():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 2)})
    found = reasons(model)
    assert found["attention.out_proj"].startswith("inside MultiheadAttention 'attention'")
    assert found["attention"] == "not a type that is converted: MultiheadAttention"
    with pytest.raises(ModelError, match="inside MultiheadAttention"):
        svdc.convert(nn.MultiheadAttention(4, 2))


def test_reason_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    assert reasons(model)["0"] == "lazy: run the model once first"
    model(torch.randn(2, 5))
    assert reasons(model)["0"] == ""


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_reason_empty():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 0), nn.Linear(0, 3))
    assert reasons(model) == {"0": "", "1": "its weight is empty, of shape (0, 2)", "2": "its weight is empty, of shape (3, 0)"}
    assert [name for name, _ in variational_layers(svdc.convert(model))] == ["0"]
    with pytest.raises(ModelError, match=r"nothing to convert in Linear \(: its weight is empty"):
        svdc.convert(nn.Linear(4, 0))


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_and_changes_nothing(field):
    model = mlp()
    with pytest.raises(ModelError, match=rf"{field}: 'head\*' matches no module.*it has 0, 1, 2, 3"):
        svdc.convert(model, **{field: ["head*"]})
    assert not list(variational_layers(model))


def test_nothing_to_convert_is_an_error_with_the_reasons():
    with pytest.raises(ModelError, match=r"nothing to convert in Sequential \(0: not a type that is converted: BatchNorm1d"):
        svdc.convert(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ModelError, match="it has no layers"):
        svdc.convert(nn.ReLU())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prior": "laplace"}, "prior: unknown 'laplace'"),
        ({"share": "unit"}, "share: unknown name 'unit'"),
        ({"share": []}, "share: name at least one"),
        ({"share": {"input": -1}}, "positive parts"),
        ({"threshold": {"rows": 3}}, "threshold: unknown name 'rows'"),
    ],
)
def test_a_wrong_option_is_an_error_and_changes_nothing(wrong, message):
    model = mlp()
    with pytest.raises(ModelError, match=message):
        svdc.convert(model, **wrong)
    assert not list(variational_layers(model))


# Ties


class Tied(nn.Module):
    """One Linear under two names, and two more that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x):
        return self.right(self.left(self.again(self.first(x))))


def test_tied_modules_are_converted_once_and_stay_tied():
    model = Tied()
    found = reasons(model)
    assert found["first"] == "" and found["again"] == "shared with another module: it is also 'first'"
    svdc.convert(model)
    assert model.first is model.again and isinstance(model.first, VariationalLinear)
    assert [name for name, _ in variational_layers(model)] == ["first", "left", "right"]


def test_a_tied_module_is_found_and_excluded_by_any_of_its_names():
    model = svdc.convert(Tied(), include=["again"])
    assert isinstance(model.first, VariationalLinear) and not isinstance(model.left, VariationalLinear)
    assert reasons(Tied(), exclude=["again"])["first"] == "excluded"


def test_tied_weights_have_one_posterior():
    model = svdc.convert(Tied())
    assert model.left.weight is model.right.weight and model.left.log_sigma2 is model.right.log_sigma2
    with torch.no_grad():
        model.left.log_sigma2.uniform_(-12, 8)
    expected = model.first.kl() + model.left.kl()
    torch.testing.assert_close(svdc.kl_divergence(model), expected)
    copied = copy.deepcopy(model)
    assert copied.left.log_sigma2 is copied.right.log_sigma2 and copied.left.weight is copied.right.weight


def test_a_tie_holds_when_its_ends_are_converted_one_after_the_other():
    model = Tied()
    svdc.convert(model, include=["left", "right"])
    halves = Tied()
    halves.right.weight = nn.Parameter(halves.right.weight.detach().clone())
    svdc.convert(halves, include=["left"])
    halves.right.weight = halves.left.weight
    svdc.convert(halves, include=["right"])
    for found in (model, halves):
        assert found.left.log_sigma2 is found.right.log_sigma2


def test_a_weight_tied_to_something_that_stays_dense_is_left_alone():
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
            self.head.weight = self.embedding.weight

    tied = "shared with another module: its weight is also that of {!r}, which stays dense"
    assert reasons(Language())["head"] == tied.format("embedding")
    found = reasons(Tied(), exclude=["right"])
    assert found["left"] == tied.format("right")
    model = svdc.convert(Tied(), exclude=["right"])
    assert [name for name, _ in variational_layers(model)] == ["first"]


def test_tied_layers_go_back_to_what_they_computed():
    model = svdc.convert(Tied(), share=["weight", "input"], threshold=0.0)
    with torch.no_grad():
        # The first weight is dropped by its own log alpha. Input 0 stays, though it would go if judged by what then remains.
        model.left.weight.fill_(1.0)
        model.left.log_sigma2.fill_(0.4).log_()
        model.left.log_sigma2[0, 0] = torch.tensor(2.5).log()
    expected = model.eval()(x := torch.randn(5, 4))
    svdc.to_dense(model)
    assert torch.equal(model(x), expected) and model.left.weight is model.right.weight
    assert model.left.weight.count_nonzero() == 15


# Attention


def test_the_fused_encoder_path_cannot_read_past_the_layers():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2)
    model = svdc.convert(encoder, log_sigma2=-30).eval()
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        before = model(x)
        model.layers[0].linear1.log_sigma2.fill_(30.0)  # all irrelevant: only the bias of the feed-forward part is left
        after = model(x)
        with svdc.sampling(model):
            model.layers[1].linear2.log_sigma2.fill_(-2.0)
            assert not torch.equal(model(x), model(x))
    assert not torch.allclose(before, after)


# MC dropout


def test_dropout_becomes_mc_dropout_of_the_same_rate_and_mode():
    model = nn.Sequential(nn.Dropout(0.2), nn.ModuleDict({"a": nn.Dropout2d(0.3)})).eval()
    svdc.convert_dropout(model)
    assert (model[0].p, model[0].channels, model[1]["a"].p, model[1]["a"].channels) == (0.2, False, 0.3, True)
    assert not model[0].training
    x = torch.ones(400)
    assert torch.equal(model[0](x), x)
    with svdc.sampling(model):
        assert set(model[0](x).tolist()) == {0.0, 1.25}


def test_a_dropout_object_under_several_names_becomes_one_object():
    shared = nn.Dropout(0.2)
    model = nn.Sequential(shared, nn.Linear(3, 3), shared, nn.Sequential(shared), nn.Dropout(0.4))
    svdc.convert_dropout(model)
    assert repr(model[0]) == "BernoulliDropout(p=0.2, channels=False)"
    assert model[0] is model[2] is model[3][0] and model[4] is not model[0]
    assert not [module for module in model.modules() if isinstance(module, nn.Dropout)]


def test_dropout_rate_and_kind_can_be_chosen():
    model = svdc.convert_dropout(nn.Sequential(nn.Dropout(0.2)), p=0.5, gaussian=True)
    noise = model(torch.ones(40_000))
    assert abs(float(noise.mean()) - 1) < 0.03 and abs(float(noise.var()) - 1) < 0.05


def test_a_model_without_dropout_is_an_error():
    with pytest.raises(ModelError, match="no dropout layer"):
        svdc.convert_dropout(mlp())


def test_conv_classes():
    assert type(svdc.convert(nn.Sequential(nn.Conv2d(1, 1, 1)))[0]) is VariationalConv2d


def test_conv1d_of_transformers_becomes_variational_and_back():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes)).eval()
    tokens = torch.randint(0, 20, (2, 5))
    with torch.no_grad():
        before = model(tokens).last_hidden_state
    kind, weight = type(model.h[0].mlp.c_fc), model.h[0].mlp.c_fc.weight
    assert {entry.name for entry in svdc.plan(model) if entry.converted} == {
        f"h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    svdc.convert(model, log_sigma2=-40.0, share="input")
    layer = model.h[0].mlp.c_fc
    assert layer.weight is weight and layer.log_sigma2.shape == weight.shape == (8, 32)
    assert layer.canonical(layer.weight).shape == (1, 32, 8, 1)
    with torch.no_grad():
        assert torch.equal(model(tokens).last_hidden_state, before)
        layer.log_sigma2[3] = 20.0  # everything that reads one input
    assert not layer.relevant()[3].any() and layer.relevant().sum() == 7 * 32
    assert type(svdc.to_dense(model).h[0].mlp.c_fc) is kind and not weight[3].any()
