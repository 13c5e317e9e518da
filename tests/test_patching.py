"""`onepass.patch`: what is replaced, what is refused, and that all of it comes back."""

import sys
import threading
from collections import Counter
from importlib import import_module
from types import ModuleType

import pytest
import torch
from packaging.version import Version

import onepass
from onepass.cli import script
from onepass.integrations import patching, switch

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
utils = import_module("trl.trainer.utils")
loss_utils = import_module("transformers.loss.loss_utils")
ROUTERS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.6"), reason="the router is supported from transformers 5.6 on"
)


@pytest.fixture
def module():
    """A module of a user, that imported a name before."""
    made = ModuleType("somebodys_trainer")
    made.chosen = utils.selective_log_softmax
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_names_are_replaced_wherever_they_are_held(module):
    original, loss = utils.selective_log_softmax, loss_utils.ForCausalLMLoss
    with onepass.patch() as patched:
        ours = import_module("onepass.integrations.trl").selective_log_softmax
        assert utils.selective_log_softmax is module.chosen is ours
        assert {loss_utils.LOSS_MAPPING[k].__module__ for k in ("ForCausalLM", "ForConditionalGeneration")} == {
            "onepass.integrations.transformers"
        }
        # Imported while the patch is there.
        later = ModuleType("imported_later")
        later.renamed = utils.selective_log_softmax
        sys.modules[later.__name__] = later
        replaced = {(p.module, p.name): p for p in patched.replaced}
        assert replaced["somebodys_trainer", "chosen"] == ("somebodys_trainer", "chosen", original, ours)
        assert "somebodys_trainer.chosen -> onepass.integrations.trl.selective_log_softmax" in str(patched)
    del sys.modules[later.__name__]
    assert utils.selective_log_softmax is module.chosen is later.renamed is original
    assert loss_utils.LOSS_MAPPING["ForCausalLM"] is loss_utils.ForCausalLMLoss is loss


def test_the_modules_that_tests_leave_out_hold_no_reference(monkeypatch):
    libraries = [name for name in patching.NAMES if patching.is_installed(name)]
    of_some = patching.plan(*libraries).replaced
    monkeypatch.setattr("onepass.integrations.references.sys", sys)
    assert of_some == patching.plan(*libraries).replaced


@ROUTERS
def test_methods_are_replaced():
    router = import_module("transformers.models.mixtral.modeling_mixtral").MixtralTopKRouter
    forward = router.forward
    with onepass.patch("transformers") as patched:
        assert router.forward is not forward
        assert "modeling_mixtral.MixtralTopKRouter.forward -> onepass" in str(patched)
    assert router.forward is forward


def test_patches_nest_and_restore_once(module):
    original = utils.selective_log_softmax
    first, second = onepass.patch("trl"), onepass.patch("trl")
    assert second.replaced == first.replaced and first.replaced
    first.restore()
    first.restore()
    assert utils.selective_log_softmax is module.chosen is not original
    second.restore()
    assert utils.selective_log_softmax is module.chosen is original


def test_a_plan_changes_nothing(module):
    original = utils.selective_log_softmax
    planned = patching.plan()
    assert utils.selective_log_softmax is module.chosen is original
    with onepass.patch() as patched:
        assert patched.replaced == planned.replaced == patching.plan().replaced
        assert patched.kept == planned.kept


def test_what_another_wrote_over_ours_is_left_alone(module):
    original, other = utils.selective_log_softmax, object()
    with onepass.patch("trl"):
        module.chosen = other
    assert module.chosen is other and utils.selective_log_softmax is original


def test_threads():
    original = utils.selective_log_softmax
    failed, start = [], threading.Barrier(4)

    def work():
        start.wait()
        try:
            for _ in range(3):
                with onepass.patch("trl"):
                    assert utils.selective_log_softmax is not original
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and utils.selective_log_softmax is original


def test_an_unknown_signature_is_refused_as_a_whole(monkeypatch):
    def selective_log_softmax(logits, index, something_new):
        raise AssertionError

    loss = loss_utils.ForCausalLMLoss
    monkeypatch.setattr(utils, "selective_log_softmax", selective_log_softmax)
    match = rf"selective_log_softmax: onepass {onepass.__version__} knows.*trl {trl.__version__} has .*something_new"
    with pytest.raises(RuntimeError, match=match):
        onepass.patch()
    assert loss_utils.ForCausalLMLoss is loss and utils.selective_log_softmax is selective_log_softmax
    monkeypatch.delattr(utils, "selective_log_softmax")
    with pytest.raises(RuntimeError, match="has no such name; nothing of it was patched"):
        onepass.patch("trl")


def test_a_library_of_unknown_signatures_is_left_alone_as_a_whole(monkeypatch):
    def selective_log_softmax(logits, index, something_new):
        raise AssertionError

    loss, entropy = loss_utils.ForCausalLMLoss, utils.entropy_from_logits
    monkeypatch.setattr(utils, "selective_log_softmax", selective_log_softmax)
    with (
        pytest.warns(RuntimeWarning, match="trl .* has .*something_new") as caught,
        onepass.patch(strict=False) as patched,
    ):
        assert loss_utils.ForCausalLMLoss is not loss
        assert utils.selective_log_softmax is selective_log_softmax and utils.entropy_from_logits is entropy
    assert [w.filename for w in caught] == [__file__] and patched.libraries == ["transformers"]
    own = {(k.module, k.name): k.reason for k in patched.kept if k.module.startswith("trl")}
    assert {"selective_log_softmax", "entropy_from_logits"} <= {name for _, name in own}
    assert all("something_new" in reason for reason in own.values())
    assert not any(r.module.startswith("trl") for r in patched.replaced) and loss_utils.ForCausalLMLoss is loss
    monkeypatch.setenv("ONEPASS_PATCH", "trl")
    with pytest.warns(RuntimeWarning, match="something_new"):
        switch.patch_process().restore()
    with pytest.warns(RuntimeWarning, match="something_new"):
        assert script.patch_libraries().startswith("patched nothing (0 names replaced, ")


@pytest.mark.parametrize("library", [name for name in patching.NAMES if patching.is_installed(name)])
def test_what_is_patched_is_said_of_every_library(monkeypatch, library):
    monkeypatch.setenv("ONEPASS_PATCH", library)
    patched = patching.patch(library)
    monkeypatch.setattr(script.onepass, "patch", lambda *names, strict: patched)
    with patched:
        assert script.patch_libraries().startswith(f"patched {library} {patching.version_of(library)} (")


@ROUTERS
def test_a_router_that_does_something_else_keeps_its_code(monkeypatch):
    router = import_module("transformers.models.olmoe.modeling_olmoe").OlmoeTopKRouter

    def forward(self, hidden_states):
        return hidden_states.topk(self.top_k)[0]

    monkeypatch.setattr(router, "forward", forward)
    one, x = router(transformers.OlmoeConfig(hidden_size=8, num_experts=4, num_experts_per_tok=2)), torch.randn(3, 8)
    with onepass.patch("transformers"):
        assert router.forward is not forward and torch.equal(one(x), x.topk(2)[0])


@ROUTERS
def test_routers_that_are_imported_later():
    """They are replaced when their model is built, and restored with the patch that was there, or the last one."""
    name = "transformers.models.flex_olmo.modeling_flex_olmo"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delitem(sys.modules, name, raising=False)
        first = onepass.patch("transformers")
        assert name not in str(first)
        module = import_module(name)
        forward = module.FlexOlmoTopKRouter.forward
        config = transformers.FlexOlmoConfig(
            vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        module.FlexOlmoForCausalLM(config)
        assert module.FlexOlmoTopKRouter.forward is not forward
        second = onepass.patch("transformers")
        first.restore()
        assert module.FlexOlmoTopKRouter.forward is not forward and "FlexOlmoTopKRouter" in str(second)
        second.restore()
        assert module.FlexOlmoTopKRouter.forward is forward


def test_a_failure_half_way_is_undone(monkeypatch, module):
    planned = patching.plan().replaced
    original, loss = utils.selective_log_softmax, loss_utils.ForCausalLMLoss
    write, count = patching.Place.write, Counter()

    def fails(self, value):
        count["writes"] += 1
        if count["writes"] == 5:
            raise OSError("of somebody's __setattr__")
        write(self, value)

    monkeypatch.setattr(patching.Place, "write", fails)
    with pytest.raises(OSError, match="somebody"):
        onepass.patch()
    assert utils.selective_log_softmax is module.chosen is original
    assert loss_utils.LOSS_MAPPING["ForCausalLM"] is loss_utils.ForCausalLMLoss is loss
    assert not patching._active and patching.plan().replaced == planned


def test_a_failure_of_what_follows_the_replacements_is_undone(monkeypatch, module):
    original = utils.selective_log_softmax

    def fails():
        raise ImportError("of a dependency")

    monkeypatch.setattr(import_module("onepass.integrations.transformers"), "register", fails, raising=False)
    with pytest.raises(ImportError, match="dependency"):
        onepass.patch()
    assert utils.selective_log_softmax is module.chosen is original and not patching._active


def test_a_replacement_that_is_kept_falls_back_to_the_original():
    with onepass.patch("torch"):
        kept = torch.nn.functional.cross_entropy
    assert torch.nn.functional.cross_entropy is not kept
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert torch.equal(kept(logits, target), torch.nn.functional.cross_entropy(logits, target))


def test_versions_and_names(monkeypatch):
    with pytest.raises(ValueError, match=r"libraries: expected any of 'transformers', 'trl', .*, got 'TRL'"):
        onepass.patch("TRL")
    monkeypatch.setattr(trl, "__version__", "0.20.0")
    with onepass.patch("trl") as patched:
        assert not patched.replaced and len(patched.kept) >= 4
        assert "selective_log_softmax kept: supported from 0.29; trl 0.20.0 has" in str(patched)
    monkeypatch.setattr(patching, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"trl is not installed; pip install 'onepass\[trl\]'"):
        onepass.patch("trl")
    with onepass.patch() as patched:
        assert str(patched) == "nothing to replace"


def test_the_version_from_which_a_name_is_gone(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "0.30.0")
    assert not patching.unsupported("trl.trainer", "0.30", "0.31")
    reason = patching.unsupported("trl.trainer", "0.29", "0.30")
    assert reason.startswith("supported from 0.29 to before 0.30; trl 0.30.0 has no such name")


def test_each_replacement_of_transformers_is_made_from_its_version_on():
    with onepass.patch("transformers") as patched:
        replaced = {(p.module, p.name) for p in patched.replaced}
        kept = {(k.module, k.name): k.reason for k in patched.kept}
        for t in import_module("onepass.integrations.transformers").TARGETS:
            has = Version(import_module(t.module.partition(".")[0]).__version__)
            if has < Version(t.since):
                assert kept[t.module, t.name].startswith(f"supported from {t.since}; ")
            elif t.registered:
                assert getattr(import_module(t.module), t.name)["onepass"] is t.replacement
            else:
                assert (t.module, t.name) in replaced


@pytest.mark.parametrize("version, registered", [("5.6.2", False), ("5.7.0", True)])
def test_experts_of_a_version_that_takes_no_name_of_others(version, registered, monkeypatch):
    patching.plan("transformers")  # imports its models, with which transformers may put itself into sys.modules anew
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    registry = pytest.importorskip("transformers.integrations.moe", reason="of transformers 5").ALL_EXPERTS_FUNCTIONS
    names = {name: function for name, function in registry._global_mapping.items() if name != "onepass"}
    monkeypatch.setattr(type(registry), "_global_mapping", names)
    planned = patching.plan("transformers")
    with onepass.patch("transformers") as patched:
        assert ("onepass" in registry) == registered
    assert patched.kept == planned.kept
    kept = f"transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS kept: supported from 5.7; transformers {version} has"
    assert (kept in str(patched)) != registered


def test_a_library_that_cannot_be_imported_is_left_alone(monkeypatch):
    pytest.importorskip("peft")
    with onepass.patch("transformers"):  # which imports all that needs PEFT itself
        pass
    monkeypatch.setitem(sys.modules, "peft", None)
    with onepass.patch("transformers") as patched:
        assert patched.replaced
    assert "peft.tuners.lora.layer.ParamWrapper._activate_lora kept: cannot be imported: " in str(patched)


def test_it_logs_one_line(logged):
    with onepass.patch("transformers") as patched:
        pass
    (line,) = [r.getMessage() for r in logged if r.name == "onepass"]
    assert line == f"onepass: patched transformers: {len(patched.replaced)} names replaced, {len(patched.kept)} kept"


def test_callback(logged, tmp_path):
    """Of a Trainer: what is replaced is replaced while it trains, and logged; also if the run fails."""
    import torch

    from onepass.integrations import OnepassCallback

    original, seen = loss_utils.ForCausalLMLoss, []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(loss_utils.ForCausalLMLoss)
            if fails:
                raise KeyError("step")

    sizes = dict(vocab_size=19, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    data = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 2
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    callback = OnepassCallback("transformers")
    for fails in (False, True):
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback, Look()])
        if fails:
            with callback, pytest.raises(KeyError):
                trainer.train()
        else:
            trainer.train()
        assert loss_utils.ForCausalLMLoss is original
    assert [f.__module__ for f in seen] == ["onepass.integrations.transformers"] * 2
    assert any("ForCausalLMLoss -> onepass" in r.getMessage() for r in logged)
    with pytest.raises(ValueError, match="libraries: expected any of"):
        OnepassCallback("torchvision")


def test_every_warning_has_a_code_that_the_docs_explain():
    """Found by the calls that warn: each text ends with its code."""
    import re
    from pathlib import Path

    sources = Path(onepass.__file__).parent
    codes, calls = [], 0
    for path in sources.rglob("*.py"):
        text = path.read_text()
        calls += len(re.findall(r"warnings\.warn\(", text))
        codes += re.findall(r"\[(OP\d{3})\]", text)
    page = sources.parents[1] / "docs" / "warnings.md"
    assert calls == len(codes) and set(codes) == set(re.findall(r"^\| (OP\d{3}) ", page.read_text(), re.M))


def test_a_named_library_of_which_nothing_can_be_replaced_is_a_warning(monkeypatch):
    module = import_module("onepass.integrations.trl")
    monkeypatch.setattr(module, "TARGETS", [t._replace(since="99") for t in module.TARGETS])
    with pytest.warns(RuntimeWarning, match=r"^libraries: nothing of 'trl' is replaced; trl\..* from 99; .*\[OP005\]$"):
        onepass.patch("trl").restore()
    onepass.patch().restore()  # it is not named


def test_references_in_a_dict_of_another_library(monkeypatch):
    """Of a module that was imported before the patch, and of one that is imported during it."""
    library = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")
    theirs = library.vocab_parallel_cross_entropy
    modules = [ModuleType(f"megatron.of_a_user_{n}") for n in range(2)]
    modules[0].LOSSES = {"plain": theirs}
    monkeypatch.setitem(sys.modules, modules[0].__name__, modules[0])
    with onepass.patch("megatron"):
        ours = library.vocab_parallel_cross_entropy
        assert modules[0].LOSSES["plain"] is ours is not theirs
        modules[1].LOSSES = {"plain": ours}
        monkeypatch.setitem(sys.modules, modules[1].__name__, modules[1])
    assert all(m.LOSSES["plain"] is theirs for m in modules)


def test_a_callback_that_leaves_unknown_versions_alone(monkeypatch):
    module = import_module("onepass.integrations.trl")
    monkeypatch.setattr(module, "TARGETS", [t._replace(signatures=("unknown",)) for t in module.TARGETS])
    state = transformers.TrainerState()
    with pytest.raises(RuntimeError, match=r"onepass .* knows it as"):
        onepass.integrations.OnepassCallback("trl").on_train_begin(None, state, None)
    callback = onepass.integrations.OnepassCallback("trl", strict=False)
    with pytest.warns(RuntimeWarning, match=r"\[OP004\]"):
        callback.on_train_begin(None, state, None)
    assert not callback.patched.replaced
    callback.restore()
    with pytest.raises(TypeError, match="strict: expected a bool"):
        onepass.integrations.OnepassCallback("trl", strict="no")


def test_replayed_is_a_bool():
    with pytest.raises(TypeError, match="replayed: expected a bool"):
        onepass.integrations.SelectionBiasCallback(0.1, replayed="no")
    with (
        pytest.raises(TypeError, match="replayed: expected a bool"),
        onepass.moe.count_experts(torch.nn.Linear(2, 2), replayed="no"),
    ):
        pass
