"""Whole trainings of a tiny model with lazy logits and without: the Trainer of transformers, DDP and FSDP2."""

import contextlib
import functools
import os
import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import forks
import onepass

transformers = pytest.importorskip("transformers")
load_file = import_module("safetensors.torch").load_file

VOCAB, LENGTH, STEPS, BATCH = 101, 12, 5, 4


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """As a user's CPU has it; logits that are materialized are an error."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", onepass.MaterializedLogits)
        yield


def tiny(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.1, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def data(count, seed=0):
    """Sequences of which something can be learned; some labels are ignored, the same number in every pair of rows."""
    g = torch.Generator().manual_seed(seed)
    start, by = torch.randint(3, 90, (count, 1), generator=g), torch.randint(1, 3, (count, LENGTH), generator=g)
    ids = (start + by.cumsum(-1)) % VOCAB
    labels = ids.clone()
    labels[::2, :4] = -100
    return [{"input_ids": i, "labels": n} for i, n in zip(ids, labels)]


# The Trainer of transformers.


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def accuracy(prediction):
    return {"accuracy": (prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean()}


def argmax(logits, labels):
    assert type(logits) is torch.Tensor
    return logits.argmax(-1)


EVALUATION = dict(compute_metrics=accuracy, preprocess_logits_for_metrics=argmax, eval_dataset=data(8, seed=1))
CASES = {
    "full": (tiny, {}, {}),
    "tied embeddings": (lambda: tiny(tie_word_embeddings=True), {}, {}),
    "LoRA": (lambda: lora(tiny()), {}, {}),
    "gradient accumulation": (tiny, {"gradient_accumulation_steps": 2}, {}),
    "label smoothing": (tiny, {"label_smoothing_factor": 0.1}, {}),
    "label smoothing and LoRA": (lambda: lora(tiny()), {"label_smoothing_factor": 0.1}, {}),
    "gradient checkpointing": (tiny, {"gradient_checkpointing": True}, {}),
    "evaluation": (tiny, {"eval_strategy": "steps", "eval_steps": 2}, EVALUATION),
}


def train(folder, model, arguments, options, resume=None):
    """The log of every step and of every evaluation, and the weights that are saved at the end."""
    arguments = dict(save_strategy="no", max_steps=STEPS) | arguments
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, logging_steps=1, report_to="none", use_cpu=True,
        seed=0, learning_rate=1e-2, adam_epsilon=1e-3, disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=data(40), **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "saved"))
    saved = next((folder / "saved").glob("*.safetensors"))
    kept = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
    return [{k: log[k] for k in kept if k in log} for log in trainer.state.log_history], load_file(saved)


def assert_same(ours, theirs):
    (logs, saved), (expected, of_expected) = ours, theirs
    assert len({log["loss"] for log in logs if "loss" in log}) >= 2  # it learns
    torch.testing.assert_close(logs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(saved, of_expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def losses(monkeypatch):
    """How many losses were computed from lazy logits."""
    seen = []
    original = onepass.LinearLogits.loss

    def loss(self, *args, **kwargs):
        seen.append(self.tensor is None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(onepass.LinearLogits, "loss", loss)
    return seen


ONE_WORKER = pytest.mark.xdist_group("trainings")  # has those of transformers


@functools.cache
def log_of_transformers(name, folder):
    make, arguments, options = CASES[name]
    return train(folder / name, make(), arguments, options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("theirs")


@ONE_WORKER
@pytest.mark.parametrize("name", CASES)
def test_trainer(name, tmp_path, losses, folder):
    """Losses, norms of gradients, metrics and saved weights of five steps."""
    make, arguments, options = CASES[name]
    theirs = log_of_transformers(name, folder)
    assert not losses
    with onepass.patch("transformers"):
        ours = train(tmp_path / "ours", make(), arguments, options)
    assert losses == [True] * STEPS * arguments.get("gradient_accumulation_steps", 1)
    assert_same(ours, theirs)
    if options:
        assert len([log for log in ours[0] if "eval_accuracy" in log]) == 3


ATTACHED = "LoRA", "label smoothing", "evaluation"


@ONE_WORKER
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ATTACHED else pytest.mark.exhaustive) for name in CASES]
)
def test_trainer_of_an_attached_model(name, tmp_path, losses, folder):
    """The same on an instance that is attached, whose label smoothing takes tensors."""
    make, arguments, options = CASES[name]
    theirs, model = log_of_transformers(name, folder), make()
    losses.clear()
    with onepass.attach(model):
        ours = train(tmp_path, model, arguments, options)
    assert len(losses) == (0 if "label smoothing" in name else STEPS * arguments.get("gradient_accumulation_steps", 1))
    assert_same(ours, theirs)


def test_resumed(tmp_path, losses):
    """A checkpoint with the patch continues one without it."""
    arguments = {"save_strategy": "steps", "save_steps": 2}
    theirs = train(tmp_path / "theirs", tiny(), arguments, {})
    with onepass.patch("transformers"):
        ours = train(tmp_path / "ours", tiny(), {}, {}, resume=str(tmp_path / "theirs" / "checkpoint-2"))
    assert losses == [True] * (STEPS - 2)
    assert_same(ours, theirs)


# Several processes.

PROCESSES, DISTRIBUTED_STEPS, RATE = 2, 3, 0.5


def batches():
    rows = data(BATCH * DISTRIBUTED_STEPS, seed=2)
    for step in range(DISTRIBUTED_STEPS):
        of_step = rows[step * BATCH : (step + 1) * BATCH]
        yield {k: torch.stack([row[k] for row in of_step]) for k in of_step[0]}


def steps_of(model, rank=0, world=1, sync=lambda loss: loss, own=False):
    """Losses and gradients of every step of SGD, of the loss of the model or of one's ``own`` of its logits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, gradients = [], []
    for batch in batches():
        share = {k: v[rank * BATCH // world : (rank + 1) * BATCH // world] for k, v in batch.items()}
        optimizer.zero_grad()
        out = model(**share)
        assert world == 1 or isinstance(out.logits, onepass.LinearLogits), type(out.logits)
        loss = out.loss
        if own:
            loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), share["labels"][:, 1:].flatten())
        loss.backward()
        losses.append(sync(loss.detach()))
        gradients.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return losses, gradients, weights


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def ddp(model, **options):
    return nn.parallel.DistributedDataParallel(model, **options)


def fsdp(model, *units, layers=True, reshards=None, **policy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, options = init_device_mesh("cpu", (PROCESSES,)), {} if reshards is None else {"reshard_after_forward": True}
    for unit in (*(model.model.layers if layers else ()), *units, model):
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy), **options)
    return model


BFLOAT16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


WRAPPED = {
    "DDP": lambda: (ddp, tiny()),
    "DDP, tied embeddings": lambda: (ddp, tiny(tie_word_embeddings=True)),
    "FSDP2": lambda: (fsdp, tiny()),
    "FSDP2, tied embeddings": lambda: (fsdp, tiny(tie_word_embeddings=True)),
    "FSDP2, the head apart": lambda: (lambda model: fsdp(model, model.lm_head), tiny()),
    "FSDP2, the head and the norm": lambda: (lambda model: fsdp(model, [model.lm_head, model.model.norm]), tiny()),
    "FSDP2, bfloat16": lambda: (lambda model: fsdp(model, **BFLOAT16), tiny()),
    "FSDP2, bfloat16, the head apart": lambda: (lambda model: fsdp(model, model.lm_head, **BFLOAT16), tiny()),
    "DDP, static graph": lambda: (lambda model: ddp(model, static_graph=True), tiny()),
    "FSDP2, the model alone": lambda: (lambda model: fsdp(model, layers=False), tiny()),
    "FSDP2, all sharded again": lambda: (lambda model: fsdp(model, reshards=True), tiny()),
}
OWN = "DDP, static graph", "FSDP2, the model alone", "FSDP2, all sharded again", "FSDP2, the head apart"


# Every way to wrap a model is patched, and attached before or after it is wrapped.
WAYS = [(name, by) for n, name in enumerate(WRAPPED) for by in ("patch", ("attach before", "attach after")[n % 2])]
WAYS += [(name, f"{by}, own loss") for name, by in WAYS if name in OWN and by != "attach after"]
BRIEF = [way for n, way in enumerate(WAYS[: 2 * len(WRAPPED)]) if n % 4 in (0, 3)]  # each wrapping in one way
BRIEF += [("FSDP2", "attach before"), *({name: (name, by) for name, by in WAYS if "own loss" in by}.values())]


def linear_loss(hidden, weight, target):
    return onepass.linear_cross_entropy(hidden, weight, target), onepass.linear_cross_entropy(
        hidden, weight, target, reduction="none"
    ).mean()


def head():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(10, 8, generator=g), torch.randn(VOCAB, 8, generator=g)
    return hidden, weight, torch.arange(10)


def of_sharded_weight(rank):
    """The gradients of a DTensor, of losses of the rows of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    hidden, weight, target = head()
    found = []
    for shape, placements in (((2,), [Shard(0)]), ((1, 2), [Replicate(), Shard(0)]), ((2, 1), [Replicate(), Shard(0)])):
        mesh = init_device_mesh("cpu", shape)
        sharded = distribute_tensor(weight, mesh, placements).requires_grad_()
        for loss in linear_loss(hidden[rank::2], sharded, target[rank::2]):
            found.append(whole(torch.autograd.grad(loss, sharded)[0]))
    return found


def losses_of_fsdp1(orig, way):
    """Losses of three steps under FSDP1, whose parameters and gradients are shards of flat ones."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model, rank = tiny(), torch.distributed.get_rank()
    if way == "attach":
        onepass.attach(model)
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=orig, device_id=torch.device("cpu")
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    with onepass.patch("transformers") if way == "patch" else contextlib.nullcontext():
        for batch in batches():
            optimizer.zero_grad()
            out = model(**{k: v[rank * BATCH // PROCESSES : (rank + 1) * BATCH // PROCESSES] for k, v in batch.items()})
            assert way == "plain" or isinstance(out.logits, onepass.LinearLogits)
            out.loss.backward()
            losses.append(out.loss.detach())
            optimizer.step()
    return losses


OF_FSDP1 = [(orig, way) for orig in (True, False) for way in ("plain", "patch", "attach")]


def process(rank, folder, ways):
    """All cases in one process of a group."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(os.path.join(folder, "store"), PROCESSES)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    warnings.simplefilter("error", onepass.MaterializedLogits)

    def mean(loss):
        torch.distributed.all_reduce(loss)
        return loss / PROCESSES

    found = {}
    for name, by in ways:
        wrap, model = WRAPPED[name]()
        try:
            if by.startswith("attach before"):
                onepass.attach(model)
            wrapped = wrap(model)
            if by == "attach after":
                onepass.attach(wrapped)
            with onepass.patch("transformers") if by.startswith("patch") else contextlib.nullcontext():
                found[name, by] = steps_of(wrapped, rank, PROCESSES, mean, by.endswith("own loss"))
        except RuntimeError as error:
            found[name, by] = f"{type(error).__name__}: {error}"
    found["sharded weight"] = of_sharded_weight(rank)
    found |= {("FSDP1", *case): losses_of_fsdp1(*case) for case in OF_FSDP1}
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


def of_fewer_processes(rank, folder):
    """Loss and gradients where FSDP2 shards the head over two of four processes after its forward, and sums them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(os.path.join(folder, "store"), 4)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=4)
    found, mesh, batch = [], init_device_mesh("cpu", (4,)), next(batches())
    for attached in (False, True):
        model = tiny().double()
        if attached:
            onepass.attach(model)
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        for unit in (model.lm_head, model):
            unit.set_gradient_divide_factor(1.0)
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}))
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


@forks.GROUP
def test_a_head_that_fsdp_shards_over_fewer_processes_after_its_forward(tmp_path):
    forks.spawn(of_fewer_processes, (str(tmp_path),), 4)
    for rank in range(4):
        plain, attached = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(attached, plain)


@pytest.fixture(scope="module")
def distributed(request, tmp_path_factory):
    """What each of two processes has computed, in the ways that are tested."""
    folder = tmp_path_factory.mktemp("distributed")
    tests = [item.callspec.params for item in request.session.items if item.name.startswith("test_processes[")]
    forks.spawn(process, (str(folder), [(values["name"], values["by"]) for values in tests]), PROCESSES)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@forks.GROUP
@pytest.mark.parametrize(
    "name, by", [pytest.param(*way, marks=[] if way in BRIEF else pytest.mark.exhaustive) for way in WAYS]
)
def test_processes(name, by, distributed):
    """Losses, gradients and weights of two processes are those of one process on the whole batch."""
    _, model = WRAPPED[name]()
    close = dict(rtol=0, atol=0.05) if "bfloat16" in name else dict(rtol=1e-5, atol=1e-5)
    losses, gradients, weights = steps_of(model, own=by.endswith("own loss"))
    assert losses[0] > losses[-1]
    for found in distributed:
        assert not isinstance(found[name, by], str), found[name, by]
        of_losses, of_gradients, of_weights = found[name, by]
        bare = lambda named: {n.removeprefix("module."): t for n, t in named.items()}  # noqa: E731
        torch.testing.assert_close(of_losses, losses, **close)
        torch.testing.assert_close([*map(bare, of_gradients)], gradients, **close)
        torch.testing.assert_close(bare(of_weights), weights, **close)


@forks.GROUP
def test_fsdp1(distributed):
    for found in distributed:
        expected = found["FSDP1", True, "plain"]
        assert len(expected) == DISTRIBUTED_STEPS
        for case in OF_FSDP1:
            torch.testing.assert_close(found[("FSDP1", *case)], expected, rtol=1e-5, atol=1e-5)


def test_label_smoothing_under_fsdp1(monkeypatch):
    """FSDP1 looks for tensors in what a model returns, and without labels the logits are all that it returns."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from onepass.integrations import lazy_logits, transformers

    monkeypatch.setattr(transformers, "original", lambda *name: lambda *args: lazy_logits._asked.get())
    trainer = SimpleNamespace(label_smoother=object(), compute_loss_func=None)
    asked = [transformers.compute_loss(trainer, m) for m in (tiny(), object.__new__(FullyShardedDataParallel))]
    assert asked == [True, False]


def test_when_a_trainer_needs_the_logits_that_it_smooths(monkeypatch):
    """DDP may look for them in what a model returns, and a loss function of one's own may read them."""
    from onepass.integrations import lazy_logits, transformers

    monkeypatch.setattr(transformers, "original", lambda *name: lambda *args, **options: lazy_logits._asked.get())
    looks, plain = (object.__new__(nn.parallel.DistributedDataParallel) for _ in range(2))
    looks.__dict__["find_unused_parameters"], plain.__dict__["find_unused_parameters"] = True, False
    trainer = SimpleNamespace(label_smoother=object(), compute_loss_func=None)
    assert transformers.compute_loss(trainer, plain) and not transformers.compute_loss(trainer, looks)
    assert not transformers.compute_loss(trainer, model=looks)
    own = SimpleNamespace(label_smoother=object(), compute_loss_func=print)
    assert not transformers.compute_loss(own, plain)


@forks.GROUP
def test_sharded_weight(distributed):
    """The gradient of a DTensor is the mean over the processes, each of which has rows of its own."""
    hidden, weight, target = head()
    weight.requires_grad_()
    expected = torch.autograd.grad(linear_loss(hidden, weight, target)[0], weight)[0]
    for found in distributed:
        assert len(found["sharded weight"]) == 6
        for gradient in found["sharded weight"]:
            torch.testing.assert_close(gradient, expected)
