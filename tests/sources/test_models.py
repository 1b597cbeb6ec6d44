"""Models by name: factories, packages that may be missing, transformers folders."""

import copy
import json
import sys
import types

import pytest
import torch
from torch import nn

from svdcompress.batch import call, main_output
from svdcompress.errors import DependencyError, ModelError
from svdcompress.recipe import ModelSection
from svdcompress.sources import arrives_trained, came_in, fresh_weights, image_statistics, make_model


def make(name, **args):
    section = ModelSection(name=name, args=args)
    return make_model(section), section


def fake(monkeypatch, name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(("name", "package"), [("torchvision:resnet18", "torchvision"), ("timm:resnet18", "timm")])
def test_a_package_that_is_not_there_is_named_with_the_way_to_get_it(monkeypatch, name, package):
    for module in (package, f"{package}.models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DependencyError, match=rf"model: {name} needs the package {package}: pip install {package}"):
        make(name)


def test_torchvision_and_timm_get_their_names_and_no_weights_unless_asked(monkeypatch):
    asked = []

    def maker(name, **args):
        asked.append((name, args))
        return nn.Linear(2, 2)

    models = fake(monkeypatch, "torchvision.models", get_model=maker)
    fake(monkeypatch, "torchvision", models=models)
    fake(monkeypatch, "timm", create_model=maker)
    assert not arrives_trained(make("torchvision:resnet18")[1], nn.Identity())
    assert arrives_trained(make("torchvision:resnet18", weights="DEFAULT")[1], nn.Identity())
    assert not arrives_trained(make("timm:vit_tiny")[1], nn.Identity())
    assert arrives_trained(make("timm:vit_tiny", pretrained=True)[1], nn.Identity())
    assert not arrives_trained(make("timm:vit_tiny", pretrained=True, num_classes=3)[1], nn.Identity())
    assert asked[:3] == [
        ("resnet18", {"weights": None}),
        ("resnet18", {"weights": "DEFAULT"}),
        ("vit_tiny", {"pretrained": False}),
    ]


def test_a_factory_is_not_taken_for_trained():
    model, section = make("lenet-5")
    assert not arrives_trained(section, model)


class Elsewhere(nn.Linear):
    """A layer that is on another device until it is moved."""

    def cpu(self):
        self.moved = True
        return super().cpu()


def test_a_model_is_made_on_the_cpu_wherever_its_factory_makes_it(monkeypatch):
    """Otherwise state loaded later, as in a search, would be on that device too, but not the examples."""
    fake(monkeypatch, "somewhere", make=lambda: Elsewhere(2, 2), nowhere=lambda: nn.Linear(2, 2, device="meta"))
    assert make("somewhere:make")[0].moved
    with pytest.raises(ModelError, match="somewhere:nowhere has weights on the meta device, without values"):
        make("somewhere:nowhere")


def test_lazy_layers_are_called_once_before(monkeypatch):
    """Otherwise a run would train them and then could not open its own files."""

    def called():
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
        model(torch.zeros(1, 2, 4))
        return model

    fake(monkeypatch, "lazily", make=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), called=called)
    with pytest.raises(ModelError, match=r"lazily:make has lazy layers without shapes \(1\): call it on a batch"):
        make("lazily:make")
    assert make("lazily:called")[0][1].in_features == 8


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """(folder, model) of a small ViT, as users save one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **size)
    model = transformers.ViTForImageClassification(config).eval()
    folder = tmp_path_factory.mktemp("vit")
    model.save_pretrained(folder)
    return folder, model


def test_a_folder_of_transformers_is_loaded_with_its_weights_and_in_silence(vit, capfd):
    folder, trained = vit
    model, section = make(f"hf:{folder}")
    x = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(main_output(call(model.eval(), x)), trained(x).logits)
    assert arrives_trained(section, model) and fresh_weights(model) == []
    said = capfd.readouterr()
    assert said.out == said.err == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_in_half_precision_is_trained_in_float32(vit, dtype, tmp_path):
    copy.deepcopy(vit[1]).to(dtype).save_pretrained(tmp_path)
    model, _ = make(f"hf:{tmp_path}")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.classifier.weight, vit[1].classifier.weight.to(dtype).float())
    assert came_in(model) == str(dtype).removeprefix("torch.") and came_in(make(f"hf:{vit[0]}")[0]) is None


def test_a_head_for_other_classes_is_fresh_and_the_rest_is_kept(vit):
    folder, trained = vit
    model, section = make(f"hf:{folder}", num_labels=5)
    assert model.classifier.out_features == 5
    assert fresh_weights(model) == ["classifier.bias", "classifier.weight"]
    assert not arrives_trained(section, model)
    assert torch.equal(model.vit.layernorm.weight, trained.vit.layernorm.weight)


def test_the_architecture_alone(vit):
    folder, trained = vit
    model, section = make(f"hf:{folder}", pretrained=False)
    assert not arrives_trained(section, model)
    assert not torch.equal(model.classifier.weight, trained.classifier.weight)


def test_what_is_wrong_with_a_folder_is_said(tmp_path, vit, monkeypatch):
    with pytest.raises(ModelError, match=rf"model: hf: {tmp_path}/absent: no such folder"):
        make(f"hf:{tmp_path}/absent")
    with pytest.raises(ModelError, match=rf"model: hf:{tmp_path}: \w+Error"):
        make(f"hf:{tmp_path}")

    def unreachable(*args, **kwargs):
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    with pytest.raises(ModelError, match=r"the hub cannot be reached \(and the current folder contains no folder my-vit\)"):
        make("hf:my-vit")
    with pytest.raises(ModelError, match=r"model\.args\.auto: transformers has no class 'AutoFoo'"):
        make(f"hf:{vit[0]}", auto="AutoFoo")


def test_how_a_folder_normalises_images(tmp_path):
    section = ModelSection(name=f"hf:{tmp_path}")
    file = tmp_path / "preprocessor_config.json"
    assert image_statistics(section) is None
    file.write_text(json.dumps({"image_mean": [0.5], "image_std": [0.25]}))
    assert image_statistics(section) == {"mean": [0.5], "std": [0.25]}
    assert image_statistics(ModelSection(name="lenet-5")) is None
    for content in ('{"do_normalize": false, "image_mean": [0.5], "image_std": [0.5]}', "{}", "not JSON"):
        file.write_text(content)
        assert image_statistics(section) is None
