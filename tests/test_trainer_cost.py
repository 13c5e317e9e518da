"""The GEMMs with the head's weight in a training step of TRL's trainers under the patch, and adapters on the head."""

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import onepass

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
trainers = import_module("trainers")
of_trl = import_module("onepass.integrations.trl_heads")
if tuple(int(part) for part in trl.__version__.split(".")[:2]) < (1, 16):
    pytest.skip("earlier versions take the log-probs otherwise", allow_module_level=True)

OPTIONS = {"sft": {}, "dpo": {}, "kto": {}, "grpo": {"beta": 0.0}, "rloo": {"beta": 0.0}}
# With a frozen head, and with a head that is trained too. Where B is trained, its gradient needs the logits again.
COUNTS = {(name, "LoRA"): (2, 4) for name in OPTIONS} | {("sft", "LoRA"): (2, 3)}
COUNTS |= {("sft", "LoRA on the head"): (2, 3), ("grpo", "LoRA on the head"): (3, 4)}
TARGETS = {"LoRA": ["q_proj"], "LoRA on the head": ["q_proj", "lm_head"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    trainers.save_model(folder)
    return folder


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """As a user's CPU has it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class HeadProducts(TorchDispatchMode):
    """Counts the GEMMs of which two dimensions are those of the head's weight."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = set(shape), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packets = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm
        if func.overloadpacket in packets:
            a, b = args[-2:]
            self.count += self.shape <= {*a.shape[-2:], b.shape[-1]}
        return func(*args, **(kwargs or {}))


def built(name, kind, folder, output, **options):
    """A trainer, and its model."""
    model = trainers.load(folder)
    if kind in TARGETS:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=TARGETS[kind])
        model = peft.get_peft_model(model, config)
    common = trainers.options_of(output, max_steps=1)
    return getattr(trainers, name)(model, common, **OPTIONS[name], **options), model


def counted(trainer, model, monkeypatch):
    """Counts from the beginning of each loss, but not what has no gradient: a reference, the KL of KTO."""
    products = HeadProducts(model.get_output_embeddings().weight.shape)
    compute_loss, step, apply = trainer.compute_loss, trainer.training_step, of_trl.ChunkedLogProbFunction.apply

    def log_probs(*args):
        before = products.count
        found = apply(*args)
        products.count = products.count if torch.is_grad_enabled() else before
        return found

    def loss(*args, **kwargs):
        products.count = 0
        return compute_loss(*args, **kwargs)

    def training_step(model, inputs, *rest):
        products.step = lambda: training_step(model, inputs, *rest)
        with products:
            return step(model, inputs, *rest)

    trainer.compute_loss, trainer.training_step = loss, training_step
    monkeypatch.setattr(of_trl.ChunkedLogProbFunction, "apply", staticmethod(log_probs))
    return products


@pytest.mark.parametrize("name, kind", COUNTS, ids=str)
def test_products_of_a_step(name, kind, folder, tmp_path, monkeypatch):
    with onepass.patch("trl"):
        trainer, model = built(name, kind, folder, tmp_path)
        products = counted(trainer, model, monkeypatch)
        trainer.train()
        counts = [products.count]
        weight = model.get_output_embeddings().weight.requires_grad_()
        products.step()
    assert (*counts, products.count) == COUNTS[name, kind] and weight.grad.any()


@pytest.mark.parametrize("kind", ["full", "LoRA on the head"])
def test_sft_is_cross_entropy(kind, folder, tmp_path):
    """Loss, gradients and metrics, also of masked tokens, of a batch without any, and of a number of items."""
    with onepass.patch("trl"):
        trainer, model = built("sft", kind, folder, tmp_path)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        labels, _ = batch["labels"], model.train()
        labels[:, :3] = -100
        for items in (None, torch.tensor(7), "none"):
            labels = labels if items != "none" else torch.full_like(labels, -100)
            count, given = None if items == "none" else items, {**batch, "labels": labels}
            model.zero_grad()
            trainer._metrics["train"].clear()
            loss = trainer.compute_loss(model, given, num_items_in_batch=count)
            loss.backward()
            found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            metrics = {n: values[-1] for n, values in trainer._metrics["train"].items()}
            model.zero_grad()
            ids = {n: given[n] for n in ("input_ids", "attention_mask") if n in given}
            logits, target = model(**ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            valid = target != -100
            number = valid.sum().clamp(min=1) if count is None else count
            expected = F.cross_entropy(logits, target, reduction="sum") / number
            expected.backward()
            torch.testing.assert_close(loss, expected)
            for n, p in model.named_parameters():
                if p.grad is not None:
                    torch.testing.assert_close(found[n], p.grad, rtol=1e-4, atol=1e-6)
            if valid.any():
                p = logits[valid].log_softmax(-1).detach()
                assert metrics["entropy"] == pytest.approx(-(p.exp() * p).sum(-1).mean().item(), rel=1e-4)
                correct = (p.argmax(-1) == target[valid]).float().mean().item()
                assert metrics["mean_token_accuracy"] == pytest.approx(correct)


def test_a_loss_that_does_not_sum_is_an_error():
    from onepass.integrations.trl_heads import _OfSum

    total, values = torch.zeros((), requires_grad=True), torch.randn(4)
    valid = torch.tensor([True, True, False, True])
    upstream = torch.tensor([2.0, 2.0, 0.0, 2.0])
    assert torch.autograd.grad(_OfSum.apply(total, values, valid), total, upstream)[0] == 2.0
    assert torch.autograd.grad(_OfSum.apply(total, values, ~valid.any().expand(4)), total, 0 * upstream)[0] == 0.0
    with pytest.raises(RuntimeError, match="log_probs: expected a loss that sums them"):
        torch.autograd.grad(_OfSum.apply(total, values, valid), total, torch.arange(4.0))


def test_a_gradient_of_the_entropy_is_an_error(folder, tmp_path):
    """A hook may read it within the loss of SFT, which has no gradient of it."""
    with onepass.patch("trl"):
        trainer, model = built("sft", "full", folder, tmp_path)
        batch, seen = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))), []
        model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.entropy))
        loss = trainer.compute_loss(model.train(), batch)
        with pytest.raises(RuntimeError, match=r"^entropy: expected a loss that does not depend on it"):
            (loss - seen[0].mean()).backward()


@pytest.mark.parametrize("lengths", [(10, 8), (10, 9)])
def test_sft_with_virtual_tokens(lengths, folder, tmp_path, monkeypatch):
    """TRL's own loss, also where it leaves rows out, and as many remain as the trainer has labels."""
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_use_triton", lambda device: True)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    data = datasets.Dataset.from_list([{"input_ids": [*range(5, 5 + n)]} for n in lengths])
    found = []
    for patched in (False, True):
        torch.manual_seed(0)
        with onepass.patch("trl") if patched else nullcontext():
            common = trainers.options_of(tmp_path, max_steps=1, per_device_train_batch_size=2)
            model = peft.get_peft_model(trainers.load(folder), config)
            trainer = trl.SFTTrainer(
                model, args=trl.SFTConfig(**common), train_dataset=data, processing_class=trainers.bytes_tokenizer()
            )
            batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
            loss = trainer.compute_loss(model.train(), batch)
            loss.backward()
        found.append((loss.detach(), next(p.grad for p in model.parameters() if p.grad is not None)))
    for a, b in zip(*found):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("kind", ["LoRA on the head", "cast_lm_head_to_fp32"])
def test_a_head_that_needs_the_patch(kind, folder, tmp_path):
    """TRL's own kernel would ignore the adapter, or multiply in half precision. An adapter that is merged is used."""
    name, options = ("sft", {}) if kind in TARGETS else ("grpo", {"cast_lm_head_to_fp32": True})
    with onepass.patch("trl"):
        _, model = built(name, kind if kind in TARGETS else "full", folder, tmp_path, **options)
        ids = torch.arange(12).view(2, 6)
        given = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
        expected = model.eval()(**given).log_probs
    with pytest.raises(RuntimeError, match=r"^model: expected onepass.patch\('trl'\) to be in effect"):
        model(**given)
    if kind in TARGETS:
        merged = model.merge_and_unload()
        with onepass.patch("trl"):
            torch.testing.assert_close(merged(**given).log_probs, expected)
        torch.testing.assert_close(merged(**given).log_probs, expected)  # by TRL's own kernel


def test_adapters_that_are_still_refused(folder, tmp_path):
    with onepass.patch("trl"):
        model = trainers.load(folder)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["lm_head"])
        for adapted in (peft.get_peft_model(model, config), peft.get_peft_model(model, config).eval()):
            with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
                trainers.sft(adapted, trainers.options_of(tmp_path))
        with pytest.raises(ValueError, match=r"^cast_lm_head_to_fp32: expected False with a PEFT adapter"):
            built("grpo", "LoRA on the head", folder, tmp_path, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        built("sft", "LoRA on the head", folder, tmp_path)
