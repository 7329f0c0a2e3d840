"""Official network pickles as data: faithful files of both repositories, canaries that must never run, damaged files; safetensors; transfer.

The files are made here by a re-telling of the official protocol in a process of its own: modules `torch_utils.persistence` and `dnnlib.util`, classes whose
`__reduce__` gives (reconstruct function, ({type, version, module_src, class_name, state},)), networks with the attributes that the official ones have."""
import io
import json
import pickle
import pickletools
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from test_parity_stylegan3 import GENERATORS

from gan_course.checkpoint import save_checkpoint
from gan_course.core import UserError
from gan_course.layers import Discriminator, build_discriminator
from gan_course.official import NetworkRecord, inspect_pickle, load_official, network_kind, official_kwargs, pickle_globals, read_network_pickle, _Unpickler
from gan_course.stylegan2 import Generator, build_generator
from gan_course.transfer import export_safetensors, load_safetensors, transfer

FIXTURES = Path(__file__).parent / "fixtures" / "stylegan"
G_KWARGS = dict(z_dim=32, c_dim=0, w_dim=32, img_resolution=32, img_channels=3)
SMALL = dict(channel_base=512, channel_max=32, conv_clamp=256)

WRITER = r'''
import copy, pickle, sys, types, warnings
from collections import OrderedDict
import numpy as np, torch
from safetensors.torch import load_file

warnings.simplefilter("ignore")
spec = SPEC
torch_utils, dnnlib = types.ModuleType("torch_utils"), types.ModuleType("dnnlib")
persistence, util = types.ModuleType("torch_utils.persistence"), types.ModuleType("dnnlib.util")
sys.modules.update({"torch_utils": torch_utils, "dnnlib": dnnlib, "torch_utils.persistence": persistence, "dnnlib.util": util})

class EasyDict(dict):
    def __getattr__(self, name):
        if name in self: return self[name]
        raise AttributeError(name)
    def __setattr__(self, name, value): self[name] = value
EasyDict.__module__, EasyDict.__qualname__ = "dnnlib.util", "EasyDict"
util.EasyDict = dnnlib.EasyDict = EasyDict

def _reconstruct_persistent_obj(meta):
    space = {}
    exec(meta["module_src"], space)
    raise SystemExit("the writer's reconstruct function ran")
_reconstruct_persistent_obj.__module__, _reconstruct_persistent_obj.__qualname__ = "torch_utils.persistence", "_reconstruct_persistent_obj"
persistence._reconstruct_persistent_obj = _reconstruct_persistent_obj

class Persistent(torch.nn.Module):                 # a module by name only: its children and tensors come from the state dict
    def __init__(self, class_name, **attributes):
        super().__init__()
        self.__dict__["class_name"] = class_name
        self.__dict__.update(attributes)
    def __reduce__(self):
        state = {k: v for k, v in self.__dict__.items() if k != "class_name"}
        meta = dict(type="class", version=6, module_src=spec["source"], class_name=self.class_name, state=state)
        return _reconstruct_persistent_obj, (meta,), None

def easy(x): return EasyDict({k: easy(v) for k, v in x.items()}) if isinstance(x, dict) else x

BUFFERS = ("resample_filter", "noise_const", "w_avg", "freqs", "phases", "transform", "magnitude_ema", "Hz_geom")
def build(net):
    root = Persistent(net["class_name"], _init_args=tuple(net.get("args", ())), _init_kwargs=easy(net["kwargs"]), img_resolution=32)
    for name, tensor in load_file(net["tensors"]).items():
        if not name.startswith(net.get("prefix", "")): continue
        *path, leaf = name[len(net.get("prefix", "")):].split(".")
        at = root
        for part in path:
            if part not in at._modules: at.add_module(part, Persistent("Part", weight_gain=1/np.sqrt(7), in_size=np.broadcast_to(np.asarray(16), [2]), _init_args=(1,), _init_kwargs=EasyDict()))
            at = at._modules[part]
        if leaf in BUFFERS: at.register_buffer(leaf, tensor)
        else: at.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    for name, module in root.named_modules():
        last = name.split(".")[-1]
        if last in ("conv0", "conv1") and net.get("clamp"): module.__dict__["conv_clamp"] = net["clamp"]
        if last[:1] == "b" and last[1:].isdigit():
            module.__dict__["use_fp16"] = int(last[1:]) >= net.get("half", 10**9)
            module.add_module("mbstd_like_none", None)
    return root.eval()

content = {k: build(v) if isinstance(v, dict) and "class_name" in v else easy(v) if v is not None else None for k, v in spec["content"].items()}
with open(spec["path"], "wb") as f: pickle.dump(content, f, protocol=spec["protocol"])
'''


@pytest.fixture(scope="session")
def write(tmp_path_factory):
    "Write a pickle in a process of its own, so that this one never holds the official module names."
    folder = tmp_path_factory.mktemp("official")

    def make(name, content, source=None, protocol=4):
        path = folder / name
        spec = dict(path=str(path), content=content, protocol=protocol, source=source or f"open({str(folder / 'ran')!r}, 'w').write('module_src ran')")
        subprocess.run([sys.executable, "-c", WRITER.replace("SPEC", repr(spec), 1)], check=True)
        return path

    yield make
    assert not (folder / "ran").exists(), "the source code in a pickle was executed"
    assert "torch_utils.persistence" not in sys.modules and "dnnlib" not in sys.modules


def weights(name): return dict(tensors=str(FIXTURES / f"{name}.safetensors"), prefix="weights.")


@pytest.fixture(scope="session")
def ada(write):
    "As stylegan2-ada-pytorch writes it: synthesis_kwargs as a dictionary, clamp and half precision given."
    synthesis = dict(SMALL, num_fp16_res=1, fp16_channels_last=True)
    g = dict(class_name="Generator", kwargs=dict(G_KWARGS, mapping_kwargs=dict(num_layers=2), synthesis_kwargs=synthesis), clamp=256, half=32, **weights("sg2_generator"))
    d = dict(class_name="Discriminator", kwargs=dict(c_dim=4, img_resolution=32, img_channels=3, channel_base=512, channel_max=16, conv_clamp=256, num_fp16_res=1, block_kwargs=dict(freeze_layers=0),
                                                     mapping_kwargs=dict(), epilogue_kwargs=dict(mbstd_group_size=4)), clamp=256, half=32, **weights("sg2_discriminator_cond"))
    data = dict(class_name_of_the_set="training.dataset.ImageFolderDataset", path="x.zip", use_labels=True, resolution=32)
    return write("network-snapshot-000100.pkl", dict(G=g, D=d, G_ema=g, augment_pipe=None, training_set_kwargs=data), protocol=3)


@pytest.fixture(scope="session")
def later(write):
    "As stylegan3 writes a StyleGAN2 network: flat arguments, clamp and half precision left to that repository's defaults."
    g = dict(class_name="Generator", kwargs=dict(G_KWARGS, mapping_kwargs=dict(num_layers=2), channel_base=512, channel_max=32, fused_modconv_default="inference_only"), clamp=256, half=8, **weights("sg2_generator"))
    return write("later.pkl", dict(G_ema=g))


# ---------------------------------------------------------------- reading

def test_every_name_of_a_faithful_file_is_known(ada):
    rows = inspect_pickle(ada)
    assert {v for _, v, _ in rows} == {"allowed"}
    assert {"torch_utils.persistence._reconstruct_persistent_obj", "collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
            "torch.storage._load_from_bytes", "dnnlib.util.EasyDict", "numpy.dtype"} <= {n for n, *_ in rows}
    assert any(n.endswith("multiarray.scalar") for n, *_ in rows)        # gains are NumPy numbers, as in official files


def test_names_arguments_and_tensors_come_out_as_they_went_in(ada):
    nets = read_network_pickle(ada)
    assert list(nets) == ["G", "D", "G_ema", "augment_pipe", "training_set_kwargs"] and nets["augment_pipe"] is None
    assert nets["training_set_kwargs"]["path"] == "x.zip" and type(nets["training_set_kwargs"]) is dict
    for which, fixture in (("G_ema", "sg2_generator"), ("D", "sg2_discriminator_cond")):
        want = {k.removeprefix("weights."): t for k, t in load_file(FIXTURES / f"{fixture}.safetensors").items() if k.startswith("weights.")}
        state = nets[which].state_dict
        assert state.keys() == want.keys() and all(torch.equal(state[k], t) and state[k].dtype == t.dtype for k, t in want.items())
    G = nets["G"]
    assert isinstance(G, NetworkRecord) and G.class_name == "Generator" and G.init_kwargs["synthesis_kwargs"]["channel_base"] == 512
    assert type(G.init_kwargs["mapping_kwargs"]) is dict and json.dumps(G.init_kwargs)
    assert G.settings["synthesis.b8.conv0.weight_gain"] == pytest.approx(7 ** -0.5) and type(G.settings["synthesis.b8.conv0.weight_gain"]) is float


@pytest.mark.parametrize("file", ["ada", "later"])
def test_the_images_are_those_of_the_papers_code(file, request):
    path = request.getfixturevalue(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        G = load_official(path)
    t = load_file(FIXTURES / "sg2_generator.safetensors")
    with torch.no_grad(): img = G.double()(t["z"].double(), noise_mode="const")
    assert (img - t["img.f64"]).norm() < 1e-9 * t["img.f64"].norm()
    assert not G.training and all(p.requires_grad for p in G.parameters())


def test_arguments_of_both_repositories(ada, later):
    kwargs, left_out = official_kwargs(read_network_pickle(ada)["G"])
    assert left_out == ["fp16_channels_last"] and (kwargs["num_fp16_res"], kwargs["conv_clamp"], kwargs["channel_max"]) == (1, 256, 32) and "synthesis_kwargs" not in kwargs
    with pytest.warns(UserWarning, match="fp16_channels_last is left out"): load_official(ada)
    kwargs, left_out = official_kwargs(read_network_pickle(later)["G_ema"])
    assert left_out == [] and (kwargs["num_fp16_res"], kwargs["conv_clamp"], kwargs["fused_modconv_default"]) == (3, 256, "inference_only")      # read from the modules
    G = load_official(later)
    assert G.init_kwargs["conv_clamp"] == 256 and [b for b in (4, 8, 16, 32) if getattr(G.synthesis, f"b{b}").use_fp16] == [8, 16, 32]


def test_discriminator(ada):
    D = load_official(ada, "D")
    assert isinstance(D, Discriminator) and D.c_dim == 4 and D.init_kwargs["conv_clamp"] == 256
    t = load_file(FIXTURES / "sg2_discriminator_cond.safetensors")
    with torch.no_grad(): logits = D.double()(t["img"].double(), t["c"].double())
    assert (logits - t["logits.f64"]).norm() < 1e-9 * t["logits.f64"].norm()


def test_positional_arguments_are_named_and_old_protocols_read(write):
    g = dict(class_name="Generator", args=[32, 0, 32], kwargs=dict(img_resolution=32, img_channels=3, mapping_kwargs=dict(num_layers=2), **SMALL), **weights("sg2_generator"))
    assert load_official(write("positional.pkl", dict(G_ema=g), protocol=2)).z_dim == 32


def test_the_full_arguments_of_converted_networks_fit_ours():
    "legacy.py writes every argument that the PyTorch networks know; all of them must find their place."
    fc = dict(num_layers=2, embed_features=None, layer_features=None, activation="lrelu", lr_multiplier=0.01)
    size = dict(channel_base=256, channel_max=16, num_fp16_res=0, conv_clamp=None)
    g = dict(z_dim=8, c_dim=0, w_dim=8, img_resolution=16, img_channels=3, mapping_kwargs=fc | dict(w_avg_beta=0.995),
             synthesis_kwargs=size | dict(architecture="skip", resample_filter=[1, 3, 3, 1], use_noise=True, activation="lrelu"))
    d = dict(c_dim=2, img_resolution=16, img_channels=3, architecture="resnet", cmap_dim=None, block_kwargs=dict(activation="lrelu", resample_filter=[1, 3, 3, 1], freeze_layers=1, fp16_channels_last=True),
             mapping_kwargs=fc, epilogue_kwargs=dict(mbstd_group_size=None, mbstd_num_channels=1, activation="lrelu")) | size
    for kwargs, state, build in ((g, make_g().state_dict(), build_generator), (d, make_d(classes=2).state_dict(), build_discriminator)):
        before = json.dumps(kwargs)
        ours, left_out = official_kwargs(NetworkRecord("x", [], kwargs, state, {}, ""))
        assert build(ours).init_kwargs["conv_clamp"] is None and left_out == (["fp16_channels_last"] if kwargs is d else []) and json.dumps(kwargs) == before


@pytest.mark.parametrize("variant", ["t", "r"])
def test_stylegan3_images_are_those_of_the_papers_code(write, variant):
    "As stylegan3 writes it: flat arguments, the mapping's depth left to that repository's default."
    kwargs = {k: v for k, v in GENERATORS[f"sg3{variant}_generator"].items() if k != "mapping_kwargs"}
    path = write(f"sg3{variant}.pkl", dict(G_ema=dict(class_name="Generator", kwargs=kwargs, **weights(f"sg3{variant}_generator"))))
    t = load_file(FIXTURES / f"sg3{variant}_generator.safetensors")
    G = load_official(path)
    with torch.no_grad(): img = G.double()(t["z"].double())
    assert (img - t["img.f64"]).norm() < 1e-6 * t["img.f64"].norm()


def test_stylegan3_with_another_upsampling_is_refused(write):
    path = write("sg3up.pkl", dict(G_ema=dict(class_name="Generator", kwargs={**GENERATORS["sg3t_generator"], "lrelu_upsampling": 4}, **weights("sg3t_generator"))))
    with pytest.raises(UserError, match="lrelu_upsampling"): load_official(path)


def test_wrong_names_and_other_networks(ada, write, tmp_path):
    with pytest.raises(UserError, match="did you mean 'G_ema'"): load_official(ada, "Gema")
    with pytest.raises(UserError, match="augment_pipe"): load_official(ada, "augment_pipe")
    from safetensors.torch import save_file
    save_file({"Hz_geom": torch.ones(12)}, tmp_path / "a.safetensors")
    path = write("augment.pkl", dict(augment_pipe=dict(class_name="AugmentPipe", kwargs=dict(xflip=1), tensors=str(tmp_path / "a.safetensors"))))
    with pytest.raises(UserError, match="no network of StyleGAN2 or StyleGAN3 .found augment_pipe of class AugmentPipe"): load_official(path, "augment_pipe")
    g = dict(class_name="Generator", kwargs=dict(G_KWARGS, mapping_kwargs=dict(num_layers=2), **SMALL), **weights("sg2_generator"))
    path = write("odd.pkl", dict(G=g | dict(kwargs=g["kwargs"] | dict(invented=1)), G_ema=g | dict(kwargs=g["kwargs"] | dict(mapping_kwargs=dict(num_layers=3)))))
    with pytest.raises(UserError, match="arguments do not fit a Generator.*invented"): load_official(path, "G")
    with pytest.raises(UserError, match="(?s)another architecture.*mapping.fc2.weight"): load_official(path)


# ---------------------------------------------------------------- nothing runs

class Call:
    "Pickles as a call of any function."
    def __init__(self, f, *args): self.f, self.args = f, args
    def __reduce__(self): return self.f, self.args


def raw(module, name, argument): return b"\x80\x04c" + f"{module}\n{name}\n".encode() + pickle.dumps(argument, 0)[:-1] + b"\x85R."


ATTACKS = ["os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "builtins.getattr", "builtins.__import__", "__builtin__.eval", "importlib.import_module",
           "torch.load", "torch.hub.load", "torch.serialization.load", "numpy.load", "numpy.testing._private.utils.runstring", "runpy.run_path", "pickle.loads", "_pickle.loads", "shutil.rmtree",
           "gan_course.core.atomic_write", "torch.storage._load_from_bytes.__globals__", "collections.OrderedDict.fromkeys", "copyreg._reconstructor", "functools.partial", "operator.attrgetter", "types.CodeType",
           "torch_utils.persistence._src_to_module", "dnnlib.util.call_func_by_name", "torch.jit.load", "torch._utils._rebuild_wrapper_subclass", "timeit.timeit", "code.interact", "webbrowser.open"]


@pytest.mark.parametrize("name", ATTACKS)
def test_names_that_could_run_something_are_refused(name, tmp_path):
    module, attribute = name.rsplit(".", 1)
    path = tmp_path / "x.pkl"
    for data in (raw(module, attribute, "touch ran"), pickle.dumps([module, attribute], 4)[:-2] + b"0\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x93."):
        path.write_bytes(data)
        assert (name, "refused", "") in inspect_pickle(path)
        with pytest.raises(UserError, match="x.pkl: nothing was run") as e: read_network_pickle(path)
        assert name in str(e.value)


def test_canaries_stay_silent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import os
    for i, f in enumerate([Call(os.system, "touch ran"), Call(open, "ran", "w"), Call(exec, "open('ran', 'w')"), Call(subprocess.Popen, "touch ran", -1, None, None, None, None, None, True, True)]):
        for protocol in range(6):
            Path("x.pkl").write_bytes(pickle.dumps({"G_ema": {"deep": [f]}}, protocol))
            for read in (read_network_pickle, load_official):
                with pytest.raises(UserError, match="nothing was run"): read("x.pkl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.pkl"]
    pickle.loads(pickle.dumps(Call(open, "ran", "w")))
    assert Path("ran").exists()                                          # the canary itself works


def test_names_that_are_hidden_are_refused_twice(tmp_path):
    "POP makes a naive listing see an allowed name where the machine looks up another one. Ours lists `?`, and the unpickler refuses by itself."
    text = lambda s: b"\x8c" + bytes([len(s)]) + s.encode()
    hidden = b"\x80\x04" + text("os") + text("system") + text("collections") + text("OrderedDict") + b"00\x93" + text("touch ran") + b"\x85R."
    (tmp_path / "x.pkl").write_bytes(hidden)
    assert pickle_globals(hidden) == ["?"]
    with pytest.raises(UserError, match=r"nothing was run.*\?"): read_network_pickle(tmp_path / "x.pkl")
    with pytest.raises(UserError, match="nothing was run.*os.system"): _Unpickler(hidden, "x.pkl").load()


def test_everything_that_is_missing_is_listed_at_once(tmp_path):
    import decimal, fractions
    (tmp_path / "x.pkl").write_bytes(pickle.dumps([decimal.Decimal(1), fractions.Fraction(1, 2), Call(print, "x")]))
    with pytest.raises(UserError, match="builtins.print, decimal.Decimal, fractions.Fraction"): read_network_pickle(tmp_path / "x.pkl")


def test_a_tensorflow_pickle_gets_its_own_advice(tmp_path):
    (tmp_path / "x.pkl").write_bytes(raw("dnnlib.tflib.network", "Network", "x"))
    with pytest.raises(UserError, match="TensorFlow pickle.*dnnlib.tflib.network.Network.*legacy.py"): read_network_pickle(tmp_path / "x.pkl")


def test_stand_ins_cannot_be_changed_or_misused(tmp_path):
    "BUILD on a stand-in, a reach outside a storage, object arrays, cycles, wrong states: an error each, and never a crash."
    g = lambda name: b"c" + "\n".join(name.rsplit(".", 1)).encode() + b"\n"
    persistent, dtype, rebuild = g("torch_utils.persistence._reconstruct_persistent_obj"), g("numpy.dtype"), g("torch._utils._rebuild_tensor_v2")
    cases = {"change a function": rebuild + b"}\x8c\x01xK\x01sb.", "change a list of slots": rebuild + b"N}\x8c\x02_fK\x01s\x86b.", "change a class": g("collections.OrderedDict") + b"N}\x8c\x01xK\x01s\x86b.",
             "no state": persistent + b"}\x85R.", "no meta": persistent + b"K\x01\x85R.", "object dtype": dtype + b"\x8c\x02O8\x89\x88\x87R.", "no storage": rebuild + b"(K\x01K\x00)))tR.",
             "call with nothing": rebuild + b")R.", "encoding": g("_codecs.encode") + b"\x8c\x01a\x8c\x04zlib\x86R.", "no dict": b"K\x01.", "persistent id": b"\x8c\x01aQ.", "extension": b"\x82\x01."}
    for what, data in cases.items():
        (tmp_path / "x.pkl").write_bytes(b"\x80\x04" + data)
        with pytest.raises(UserError, match="x.pkl: ") as e: read_network_pickle(tmp_path / "x.pkl")
        assert "Next:" in str(e.value), what
    loop = b"\x80\x04}\x94\x8c\x01a" + persistent + b"}\x8c\x05state}\x94\x8c\x08_modules}\x8c\x01xh\x01sssR" .replace(b"sssR", b"ss") + b"s\x85Rs."
    (tmp_path / "x.pkl").write_bytes(loop)
    assert read_network_pickle(tmp_path / "x.pkl")["a"].state_dict == {}  # children that are no modules are no tensors
    cycle = b"\x80\x04}\x94\x8c\x01ah\x00s."
    (tmp_path / "x.pkl").write_bytes(cycle)
    with pytest.raises(UserError, match="cannot be unpickled"): read_network_pickle(tmp_path / "x.pkl")


def test_storages_hold_no_code_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    f = io.BytesIO()
    torch.save(Call(open, "ran", "w"), f, _use_new_zipfile_serialization=False)
    inner = {"legacy": f.getvalue(), "bare": pickle.dumps(Call(open, "ran", "w")), "list": (torch.save([1], f := io.BytesIO()), f.getvalue())[1], "empty": b""}
    for what, data in inner.items():
        Path("x.pkl").write_bytes(pickle.dumps({"G": Call(torch.storage._load_from_bytes, data)}))
        with pytest.raises(UserError, match="x.pkl: cannot be unpickled"): read_network_pickle("x.pkl")
    assert not Path("ran").exists()


# ---------------------------------------------------------------- damage

def test_cut_and_changed_files(ada, tmp_path):
    whole, path, rng = ada.read_bytes(), tmp_path / "x.pkl", np.random.default_rng(0)
    for n in [0, 1, 2, 3, 10, 100, *rng.integers(0, len(whole), 8).tolist(), len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(UserError, match="x.pkl: is no whole pickle"): load_official(path)
    ends = [pos for op, _, pos in pickletools.genops(whole)]
    for at in rng.choice(ends, 40):
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            assert isinstance(read_network_pickle(path), dict)
        except UserError as e:
            assert "x.pkl" in str(e)


def test_files_of_other_kinds(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    for name, data in {"b.pkl": b"<html>not found</html>", "c.pkl": (tmp_path / "a.pt").read_bytes(), "d.pkl": b"version https://git-lfs.github.com/spec/v1\n"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name}: is no whole pickle"): inspect_pickle(tmp_path / name)
    with pytest.raises(UserError, match="no.pkl: cannot be read"): read_network_pickle(tmp_path / "no.pkl")


# ---------------------------------------------------------------- safetensors

def make_g(resolution=16, channels=3, classes=0, **kw):
    return Generator(8, classes, 8, resolution, channels, mapping_kwargs=dict(num_layers=2), **dict(channel_base=256, channel_max=16) | kw).eval()


def make_d(resolution=16, channels=3, classes=0): return Discriminator(classes, resolution, channels, channel_base=256, channel_max=16).eval()


@pytest.fixture
def snapshot(tmp_path):
    torch.manual_seed(0)
    G, D = make_g(), make_d()
    meta = dict(kimg=4, G_kwargs=G.init_kwargs, D_kwargs=D.init_kwargs, dataset=dict(name="drawn", digest="0123"))
    return G, D, save_checkpoint(tmp_path / "network-snapshot-000004.pt", dict(G=make_g().state_dict(), D=D.state_dict(), G_ema=G.state_dict()), meta)


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_export_and_back(snapshot, tmp_path, dtype):
    G, D, path = snapshot
    files = export_safetensors(path, tmp_path / "out" / "g.safetensors", dtype=dtype)
    info = json.loads(files[1].read_text())
    assert info["kind"] == "stylegan2.Generator" and info["which"] == "G_ema" and info["dataset"] == {"name": "drawn", "digest": "0123"} and info["dtype"] == (dtype or "float32") and len(info["sha256"]) == 64
    state = load_file(files[0])
    assert state.keys() == G.state_dict().keys() and all(torch.equal(state[k], t.to(state[k].dtype)) for k, t in G.state_dict().items())
    net = load_safetensors(files[0])
    assert all(t.dtype == torch.float32 and torch.equal(t, state[k].float()) for k, t in net.state_dict().items()) and not any(p.requires_grad for p in net.parameters())
    if dtype in (None, "float32"):
        z = torch.randn(2, 8)
        with torch.no_grad(): assert torch.equal(net(z, noise_mode="const"), G(z, noise_mode="const"))


def test_any_flipped_byte_of_an_export_is_found(snapshot, tmp_path):
    files = export_safetensors(snapshot[2], tmp_path / "g")
    whole = files[0].read_bytes()
    for at in np.random.default_rng(0).integers(0, len(whole), 20):
        data = bytearray(whole)
        data[at] ^= 1
        files[0].write_bytes(data)
        with pytest.raises(UserError, match="g.safetensors: is damaged"): load_safetensors(files[0])
    files[0].write_bytes(whole[:-1])
    with pytest.raises(UserError, match="is damaged"): load_safetensors(files[0])
    files[0].write_bytes(whole)
    info = json.loads(files[1].read_text())
    for changed, message in ((info | {"kind": "os.system"}, "kind"), ([], "describes no network"), (info | {"init_kwargs": info["init_kwargs"] | {"channel_max": 8}}, "another architecture"), ({"kind": 1}, "describes no network")):
        files[1].write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message): load_safetensors(files[1])


def test_a_damaged_snapshot_is_not_exported(snapshot, tmp_path):
    path = snapshot[2]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged checkpoint"): export_safetensors(path, tmp_path / "g")
    other = save_checkpoint(tmp_path / "other.pt", {"x": torch.ones(1)}, {})
    with pytest.raises(UserError, match="no snapshot of a GAN"): export_safetensors(other, tmp_path / "g")
    assert not (tmp_path / "g.safetensors").exists() and not (tmp_path / "g.json").exists()


# ---------------------------------------------------------------- transfer

@pytest.mark.parametrize("there, here, remade, refused", [
    ((16, 3, 0), (32, 3, 0), {"synthesis.b32"}, set()), ((32, 3, 0), (16, 3, 0), set(), {"synthesis.b32"}), ((16, 3, 0), (16, 3, 5), {"mapping.embed", "mapping.fc0"}, set()),
    ((16, 3, 5), (16, 3, 0), {"mapping.fc0"}, {"mapping.embed"}), ((16, 3, 5), (16, 3, 7), {"mapping.embed"}, set()),
    ((16, 3, 0), (16, 1, 0), {f"synthesis.b{r}" for r in (4, 8, 16)}, set())])
def test_generators_of_other_sizes(there, here, remade, refused):
    old, new = make_g(*there), make_g(*here)
    fresh = {k: t.clone() for k, t in new.state_dict().items()}
    report = transfer(new, old.state_dict())
    now, part = new.state_dict(), lambda verdict: {".".join(k.split(".")[:2]) for k, *_, v in report.rows if v == verdict}
    assert part("re-made") == remade and part("refused") == refused
    for k, shape_here, shape_there, verdict in report.rows:
        if verdict == "taken": assert torch.equal(now[k], old.state_dict()[k]) and shape_here == shape_there
        elif verdict == "re-made": assert torch.equal(now[k], fresh[k]) and shape_here != shape_there
        else: assert k not in now and shape_here is None
        assert verdict == "taken" or k in report.to_text(limit=1000)
    assert sum(report.counts().values()) == len(report.rows) and 0 < report.share() < 1 or not remade
    assert new(torch.randn(1, 8), torch.eye(here[2])[:1] if here[2] else None).shape == (1, here[1], here[0], here[0])


def test_discriminators_of_other_sizes():
    for there, here in (((16, 3, 0), (32, 3, 0)), ((32, 3, 0), (16, 3, 0)), ((16, 3, 0), (16, 4, 0)), ((16, 3, 0), (16, 3, 4))):
        report = transfer(make_d(*here), make_d(*there).state_dict())
        assert report.counts()["taken"] > 10 and report.counts()["re-made"] > 0, (there, here)


def test_another_width_is_refused_and_nothing_changes():
    old, new = make_g(), make_g(channel_max=8, channel_base=64)
    before = {k: t.clone() for k, t in new.state_dict().items()}
    with pytest.raises(UserError, match="nothing of the blocks fits"): transfer(new, old.state_dict())
    assert all(torch.equal(t, before[k]) for k, t in new.state_dict().items())
    for state in ({}, {"x": 3}, make_d().state_dict()):
        with pytest.raises(UserError, match="nothing of the blocks fits"): transfer(new, state)


def test_an_official_pickle_starts_a_training_at_another_resolution(ada):
    record = read_network_pickle(ada)["G_ema"]
    G = Generator(**G_KWARGS | dict(img_resolution=64), **SMALL, mapping_kwargs=dict(num_layers=2))
    report = transfer(G, record.state_dict)
    assert {k.split(".")[1] for k, *_, v in report.rows if v == "re-made"} == {"b64"} and all(p.requires_grad for p in G.parameters())
    G(torch.randn(1, 32)).sum().backward()
