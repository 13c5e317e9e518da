"""Tests of TRL and transformers, on what `onepass.patch` puts in place, and of Liger. Nothing of theirs is kept here.

    python tests/theirs.py trl PATH             # of a checkout of the version that is installed
    python tests/theirs.py transformers PATH    # of an sdist or checkout of it
    python tests/theirs.py liger PATH           # likewise: the tests of its fused linear JSD, on `linear_kl_div`

Of TRL, every test class that names a function that is replaced; those that ask for a GPU run without one, too. Of
transformers, what its mixin for all models has on losses, training and router logits, for models with a soft-cap, a
scale or neither and for every family whose router is replaced; only the mixin comes in an sdist, so the small models
are ours. What else the mixin imports is left out.
"""

import argparse
import ast
import copy
import importlib
import shutil
import sys
import tempfile
import types
import unittest
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch

import onepass
from onepass.integrations.patching import LIBRARIES

MODELS = ("llama", "gemma2", "cohere", "qwen3")
CHOSEN = "loss or training or router_logits"
SMALL = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_local_experts=8, num_experts=8, n_routed_experts=8,
    moe_num_experts=8, num_experts_per_tok=2, moe_k=2, moe_topk=2, n_shared_experts=1, n_group=2, topk_group=1,
    shared_expert_intermediate_size=16, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
    v_head_dim=8, first_k_dense_replace=0, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OF_FAMILY = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": {"head_dim": 4},
}


def classes_that_name(names: set[str], tests: Path) -> list[str]:
    """Node ids, relative to the folder that holds ``tests``."""
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(name in ast.unparse(node) for name in names):
                found.append(f"{path.relative_to(tests.parent)}::{node.name}")
    return found


def without_missing_names(files: set[Path], patch: pytest.MonkeyPatch) -> None:
    """Where their tests are of another version: what this one does not have belongs to other tests than are run."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        print(f"{node.module}.{alias.name} is not in this version")
                        patch.setattr(module, alias.name, lambda *args, **kwargs: False, raising=False)


class Tester:
    """What their mixin asks of the tester of a model."""

    is_training, batch_size, seq_length, num_hidden_layers = True, 2, 7, SMALL["num_hidden_layers"]

    def __init__(self, config: object) -> None:
        self.config = config

    def prepare_config_and_inputs_for_common(self) -> tuple[object, dict[str, torch.Tensor]]:
        tokens = torch.randint(3, SMALL["vocab_size"], (self.batch_size, self.seq_length))
        return copy.deepcopy(self.config), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def model_tests(families: list[str]) -> dict[str, type]:
    """Their mixin on a small model of every family."""
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        left_out = types.ModuleType(f"tests.{name}")
        setattr(left_out, mixin, type(mixin, (), {}))
        sys.modules[left_out.__name__] = left_out
    common = importlib.import_module("tests.test_modeling_common")
    transformers = importlib.import_module("transformers")
    found = {}
    for family in families:
        config = transformers.AutoConfig.for_model(family, **SMALL | OF_FAMILY.get(family, {}))
        model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]

        def set_up(self: unittest.TestCase, config: object = config) -> None:
            self.model_tester = Tester(config)

        found[f"Test{model_class.__name__}"] = type(
            f"Test{model_class.__name__}", (common.ModelTesterMixin, unittest.TestCase),
            {"all_model_classes": (model_class,), "setUp": set_up, "_torch_compile_train_cls": model_class},
        )  # fmt: skip
    return found


def linear_jsd(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    *how: object,
) -> torch.Tensor:
    """Liger's fused linear JSD by onepass; ``how`` Liger computes it makes no difference."""
    teacher = onepass.LinearLogits(teacher_input.detach(), teacher_weight.detach())
    of = {0.0: {"direction": "forward"}, 1.0: {"direction": "reverse"}}
    return onepass.linear_kl_div(
        student_input, student_weight, teacher, row_mask=None if shift_labels is None else shift_labels != ignore_index,
        temperature=temperature, **of.get(float(jsd_beta), {"direction": "jsd", "beta": jsd_beta}),
    )  # fmt: skip


class LinearJSD(torch.nn.Module):
    def __init__(self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0) -> None:
        super().__init__()
        self.options = jsd_beta, ignore_index, temperature

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return linear_jsd(*(*tensors, None)[:5], *self.options)


def replace_liger(patch: pytest.MonkeyPatch) -> list[str]:
    """Put these in place of Liger's, and return the tests."""
    function = types.SimpleNamespace(apply=linear_jsd)

    def functional(*tensors: torch.Tensor, accum_dtype: object = None, **options: object) -> torch.Tensor:
        return linear_jsd(*tensors, **options)  # type: ignore[arg-type]

    patch.setattr("liger_kernel.ops.LigerFusedLinearJSDFunction", function)
    patch.setattr("liger_kernel.transformers.functional.liger_fused_linear_jsd", functional)
    patch.setattr("liger_kernel.transformers.fused_linear_jsd.LigerFusedLinearJSD", LinearJSD)
    return ["test/transformers/test_fused_linear_jsd.py"]


class Outcomes:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=(*LIBRARIES, "liger"))
    parser.add_argument("source", type=Path, help="a folder that holds their tests/")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="more options of pytest")
    given = parser.parse_args()
    outcomes = Outcomes()
    of_liger = given.library == "liger"
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext() if of_liger else onepass.patch(given.library) as patched,
        pytest.MonkeyPatch.context() as m,
    ):
        # Without the package beside them, so that they import the one that is installed.
        name = "test" if of_liger else "tests"
        tests = Path(shutil.copytree(given.source / name, Path(folder) / name))
        (tests / "__init__.py").touch()
        m.chdir(folder)
        m.syspath_prepend(folder)
        print(patched)
        if of_liger:
            chosen = replace_liger(m)
        elif given.library == "trl":
            chosen = classes_that_name({place.name for place in patched.replaced}, tests)
            support = {path for path in tests.glob("*.py") if not path.name.startswith("test_")}
            without_missing_names(support | {Path(folder, node.partition("::")[0]) for node in chosen}, m)
            if not torch.cuda.is_available():  # theirs skip without a GPU what has a path for the CPU here
                m.setattr("tests.testing_utils.require_torch_accelerator", lambda of: of, raising=False)
        else:
            routed = [place.module.split(".")[2] for place in patched.replaced if ".models." in place.module]
            Path(folder, "test_models.py").write_text(
                f"from theirs import model_tests\nglobals().update(model_tests({[*MODELS, *routed]}))\n"
            )
            chosen = ["test_models.py", "-k", CHOSEN]
        if not chosen:
            parser.error(f"source: expected tests of what is replaced in {given.library}, found none in {given.source}")
        options = [f"--rootdir={folder}", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", *given.pytest]
        status = int(pytest.main([*chosen, *options], plugins=[outcomes]))
    package = "liger-kernel" if of_liger else given.library
    print(f"{package} {metadata.version(package)}: {outcomes.counts}")
    return status


if __name__ == "__main__":
    sys.exit(main())
