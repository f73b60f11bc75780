"""A task whose model comes and goes is trained as the plain loop trains it, through halts, kills and switches."""

import errno
import json
import os
import random
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rota
from rota.errors import FitError, FullDiskError, TaskError
from rota.memory import arrange, building, spilling
from rota.memory.residency import Rates
from rota.memory.slab import Budget, Slab
from rota.runtime import loop as loop_module
from rota.runtime import one_device, probe
from rota.runtime.loop import Loop
from rota.runtime.messages import Began, Finished, Halted, Noticed
from rota.strategies import spill
from rota.task import Data, Task
from rota.testing import plain, zoo
from rota.testing.models import GPT
from tests.numerics.test_exact import (
    TASKS,
    Killed,
    Mortal,
    Surroundings,
    assert_equals_plain,
    gpt_task,
    text_rows,
)

MEMORY = 2**30
FEW = ("accumulation", "groups and frozen parameters", "fused AdamW", "bfloat16", "a dataset that draws random numbers")


@pytest.fixture(autouse=True)
def tight(monkeypatch, remembered):
    """Budgets of little more than the least, for models that would fit into any; and parameters that all may leave."""
    original, settings = arrange.arrange, {"room": 1.1}

    def tightly(graph, wanted, training, *, budget_bytes, **options):
        try:
            return original(graph, wanted, training, budget_bytes=1, **options)
        except FitError as error:
            budget_bytes = int(settings["room"] * error.needed_bytes)
            return original(graph, wanted, training, budget_bytes=budget_bytes, **options)

    monkeypatch.setattr(spilling, "arrange", tightly)
    monkeypatch.setattr(building, "_LEAST_BYTES", 1)
    return settings


class Listening(Surroundings):
    def __init__(self, **options):
        super().__init__(**options)
        self.notices = []
        self.from_step = None

    def report(self, report):
        super().report(report)
        if isinstance(report, Noticed):
            self.notices.append(report.text)
        if isinstance(report, Began):
            self.from_step = report.from_step


def train(task, folder, surroundings, attempt=1, memory_bytes=MEMORY, shards=()):
    return Loop(
        task,
        attempt=attempt,
        folder=folder,
        device=torch.device("cpu"),
        surroundings=surroundings,
        memory_bytes=memory_bytes,
        shards=shards,
    ).run()


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, id=name, marks=[] if name in FEW else [pytest.mark.deep]) for name, task in TASKS.items()],
)
def test_it_equals_the_plain_loop(task, tmp_path):
    surroundings = Listening()
    task = replace(task, strategy=spill(shards=4))
    assert isinstance(train(task, tmp_path, surroundings), Finished)
    assert_equals_plain(task, tmp_path, surroundings.rows)
    assert "a step reads" in surroundings.notices[0]
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / ".building").exists()


@pytest.mark.parametrize(
    "activations",
    [pytest.param("keep", marks=pytest.mark.deep), "spill", pytest.param("recompute", marks=pytest.mark.deep), "mixed"],
)
def test_fifty_steps_whatever_happens_to_activations(activations, tmp_path, monkeypatch, tight):
    """With dropout, clipping, accumulation, AdamW and tied weights."""
    if activations == "mixed":
        arranging, some = spilling.arrange, frozenset({1, 3})
        tight["room"] = 2  # what is kept must have room, too
        monkeypatch.setattr(arrange, "_cheaper_made_again", lambda kept, rates, costs: some)
        monkeypatch.setattr(arrange, "min", lambda found, key: found[-1], raising=False)
        made = []
        monkeypatch.setattr(
            spilling, "arrange", lambda *given, **named: made.append(arranging(*given, **named)) or made[0]
        )
    wanted = "auto" if activations == "mixed" else activations
    task = gpt_task(strategy=spill(shards=5, activations=wanted), accumulate=2, steps=50)
    surroundings = Surroundings()
    train(task, tmp_path, surroundings)
    assert_equals_plain(task, tmp_path, surroundings.rows)
    if activations == "mixed":
        assert made[0].cut.recomputed == some


class Attending(torch.nn.Module):
    """PyTorch's own attention, whose weights are read by way of views."""

    def __init__(self, *, dropout, decoder):
        super().__init__()
        self.tokens = torch.nn.Embedding(32, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = (
            torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=dropout, batch_first=True) if decoder else None
        )
        self.head = torch.nn.Linear(32, 32)

    def forward(self, tokens):
        found = self.encoder(self.tokens(tokens))
        if self.decoder is not None:  # a query by itself, key and value together: two views of one parameter
            found = self.decoder(self.tokens(tokens), found)
        return self.head(found)


@pytest.mark.parametrize(
    ("dropout", "decoder", "activations"),
    [
        pytest.param(0.2, False, "spill", id="dropout as PyTorch draws it"),
        pytest.param(0.0, True, "auto", id="views of a parameter that leaves"),
        pytest.param(0.2, True, "recompute", id="both", marks=pytest.mark.deep),
    ],
)
def test_attention_of_pytorch(dropout, decoder, activations, tmp_path, tight):
    """What is kept is what was foreseen, and nothing keeps the memory of a parameter that has left."""
    tight["room"] = 1.0
    rows = torch.randint(0, 32, (16, 65), generator=torch.Generator().manual_seed(0))

    def loss(model, batch):
        found = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        return {"loss": found, "seen": model.encoder.layers[0].self_attn.in_proj_weight[3, 5]}

    task = gpt_task(
        model=lambda: Attending(dropout=dropout, decoder=decoder),
        data=lambda: Data(train=list(rows), batch_size=4),
        loss=loss,
        strategy=spill(activations=activations),
        steps=4,
    )
    surroundings = Surroundings()
    train(task, tmp_path, surroundings)
    assert_equals_plain(task, tmp_path, surroundings.rows)


def test_batches_of_a_step_go_through_the_shards_together(tmp_path, tight, monkeypatch):
    """Where nothing is drawn, and as long as they are alike; the rest of a step that was begun goes one by one."""
    tight["room"] = 4
    monkeypatch.setattr(spilling, "measured_rates", lambda folder: Rates(read_byte_s=1e-6, write_byte_s=1e-6))
    task = gpt_task(
        model=lambda: GPT(vocabulary=32, context=16, width=16, depth=2, heads=2),
        strategy=spill(shards=5),
        accumulate=4,
        steps=None,
        epochs=6,
        clip_norm=None,
    )
    rows = {}
    for attempt in range(1, 100):
        surroundings = Listening(halt_after=5 + attempt)
        single = attempt % 3 == 0
        outcome = train(replace(task, strategy="single") if single else task, tmp_path, surroundings, attempt)
        for step, row in surroundings.rows.items():
            rows.setdefault(step, {"step": step}).update(row)
        assert single or attempt > 2 or "batches at once" in surroundings.notices[0]
        if isinstance(outcome, Finished):
            break
    assert attempt >= 3
    assert_equals_plain(task, tmp_path, rows)


def t5_task(**changes):
    generator = torch.Generator().manual_seed(3)
    rows = [
        {"input_ids": torch.randint(3, 64, (9,), generator=generator), "labels": torch.randint(3, 64, (7,))}
        for _ in range(24)
    ]
    return replace(
        gpt_task(),
        name="t5",
        model=lambda: zoo.make("t5").model,
        data=lambda: Data(train=rows, valid=rows[:5], batch_size=4),
        loss=lambda model, batch: model(**batch).loss,
        **changes,
    )


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.deep)])
def test_an_encoder_with_a_decoder(tmp_path, steps):
    task = t5_task(strategy=spill(shards=6), steps=steps)
    surroundings = Surroundings()
    train(task, tmp_path, surroundings)
    assert_equals_plain(task, tmp_path, surroundings.rows)


def test_fifty_steps_of_normalised_batches(tmp_path):
    task = replace(TASKS["BatchNorm and a dict of metrics"], strategy=spill(shards=4), steps=50)
    surroundings = Surroundings()
    train(task, tmp_path, surroundings)
    assert_equals_plain(task, tmp_path, surroundings.rows)


@pytest.mark.parametrize("strategy", [spill(), "pool"])
def test_a_device_of_which_the_memory_is_unknown_is_refused(strategy, tmp_path):
    strategy = rota.strategies.pool() if strategy == "pool" else strategy
    with pytest.raises(TaskError, match="needs a device of which the memory is known"):
        train(gpt_task(strategy=strategy), tmp_path, Surroundings(), memory_bytes=0)


@pytest.mark.parametrize(
    "task", [TASKS["accumulation"], TASKS["BatchNorm and a dict of metrics"]], ids=["gpt", "resnet"]
)
def test_a_model_that_is_larger_than_memory_while_it_is_made(task, tmp_path, monkeypatch):
    task = replace(task, strategy=spill(shards=4), precision="float64")
    monkeypatch.setattr(spilling.Spilling, "_budget_bytes", lambda self: 1)
    surroundings = Surroundings()
    assert isinstance(train(task, tmp_path, surroundings, memory_bytes=20_000), Finished)
    assert_equals_plain(task, tmp_path, surroundings.rows)
    assert not (tmp_path / ".building").exists()


@pytest.mark.parametrize(
    "task",
    [TASKS["accumulation"], pytest.param(TASKS["epochs, last batch smaller"], marks=pytest.mark.deep)],
    ids=["parts", "epochs"],
)
def test_halting_after_every_few_batches_changes_nothing(task, tmp_path, tight):
    """And it is trained in turns by plain PyTorch, and by one that spills, with other shards each time."""
    tight["room"] = 3  # it may begin with a batch that is smaller than the others
    rows = {}
    for attempt in range(1, 100):
        surroundings = Surroundings(halt_after=2 + attempt * 2 % 7)
        strategy = "single" if attempt % 3 == 0 else spill(shards=2 + attempt % 4)
        outcome = train(replace(task, strategy=strategy), tmp_path, surroundings, attempt, 20_000)
        for step, row in surroundings.rows.items():
            rows.setdefault(step, {"step": step}).update(row)
        if isinstance(outcome, Finished):
            break
        assert isinstance(outcome, Halted)
        assert (tmp_path / "checkpoints").exists() is (strategy == "single")
        assert (tmp_path / "shards").exists() is (strategy != "single")
    assert attempt >= 4
    assert_equals_plain(task, tmp_path, rows)


def test_shards_go_where_the_user_says_and_are_found_where_they_were(tmp_path, tight):
    """In the run folder, on one disk, on another one, in none while the task does not spill, and in that again."""
    task, rows = TASKS["accumulation"], {}
    tight["room"] = 3
    run, one, two = tmp_path / "run", tmp_path / "one" / "run", tmp_path / "two" / "run"
    ways = [((), spill(shards=2)), ((one,), spill(shards=3)), ((two, one), spill(shards=2)), ((two, one), "single")]
    ways.append(((two, one), spill(shards=2)))
    for attempt, (shards, strategy) in enumerate(ways, 1):
        last = attempt == len(ways)
        surroundings = Listening(halt_after=None if last else 3)
        outcome = train(replace(task, strategy=strategy), run, surroundings, attempt, 20_000, shards)
        assert isinstance(outcome, Finished if last else Halted)
        assert (surroundings.from_step > 0) is (attempt > 1)
        for step, row in surroundings.rows.items():
            rows.setdefault(step, {"step": step}).update(row)
        where = None if strategy == "single" else (*shards, run)[0]
        assert [(place / "shards").exists() for place in (run, one, two)] == [
            place == where for place in (run, one, two)
        ]
    assert_equals_plain(task, run, rows)
    assert not [path for place in (one, two) for path in place.rglob(".*")]


@pytest.mark.parametrize("examples", [2, pytest.param(8, marks=[pytest.mark.deep, pytest.mark.timeout(600)])])
def test_being_killed_anywhere_changes_nothing(tmp_path_factory, tight, examples):
    tight["room"] = 1.3

    @settings(max_examples=examples, deadline=None)
    @given(
        lives=st.lists(st.integers(4, 14), min_size=1, max_size=3),
        every=st.integers(1, 3),
        accumulate=st.integers(1, 2),
        seed=st.integers(0, 100),
    )
    def holds(lives, every, accumulate, seed):
        killed_and_equal(tmp_path_factory.mktemp("task"), lives, every, accumulate, seed)

    holds()


def killed_and_equal(folder, lives, every, accumulate, seed):
    task = gpt_task(
        data=lambda: Data(train=text_rows()[:40], valid=text_rows()[:11], batch_size=8, valid_batch_size=4),
        checkpoint_every=every,
        accumulate=accumulate,
        steps=7,
        strategy=spill(shards=4),
    )
    dice = random.Random(seed)
    write = spilling.Store.write
    with pytest.MonkeyPatch.context() as patch:
        rows = {}
        for attempt, life in enumerate([*lives, 10_000], start=1):
            left = dice.randint(50, 400) if attempt <= len(lives) else 10**9

            def dying(self, item, data):
                nonlocal left
                left -= 1
                if left < 0:
                    rubbish = Slab(len(data), budget=Budget(len(data)), what="rubbish")
                    write(self, item, rubbish.bytes)
                    raise Killed
                write(self, item, data)

            patch.setattr(spilling.Store, "write", dying)
            surroundings = Mortal(dies_after=life)
            try:
                train(task, folder, surroundings, attempt)
            except Killed:
                continue
            finally:
                for step, row in surroundings.rows.items():
                    rows.setdefault(step, {"step": step}).update(row)
    assert_equals_plain(task, folder, rows)


def test_auto_spills_what_does_not_fit(tmp_path):
    task = gpt_task(steps=5)
    surroundings = Listening()
    assert isinstance(train(task, tmp_path, surroundings, memory_bytes=60_000), Finished)
    assert any(text.startswith("spill: ") for text in surroundings.notices)
    assert_equals_plain(task, tmp_path, surroundings.rows)


def test_auto_leaves_what_fits_to_plain_pytorch(tmp_path):
    surroundings = Listening()
    assert isinstance(train(gpt_task(steps=3), tmp_path, surroundings), Finished)
    assert surroundings.notices == []
    assert (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "shards").exists()


def test_too_little_memory_names_what_does_not_fit_and_the_least_that_would_do(tmp_path, monkeypatch):
    monkeypatch.setattr(spilling, "arrange", arrange.arrange)
    monkeypatch.setattr(spilling.Spilling, "_budget_bytes", lambda self: 1000)
    with pytest.raises(TaskError, match=r"pass of \S+.* needs [\d,]+ bytes at once: the task needs .* at least .*iB"):
        train(gpt_task(strategy=spill()), tmp_path, Surroundings())


def test_an_optimizer_that_looks_at_everything_is_refused(tmp_path):
    task = gpt_task(strategy=spill(), optimizer=lambda model: torch.optim.LBFGS(model.parameters()), lr_schedule=None)
    with pytest.raises(TaskError, match="LBFGS may look at all parameters at once"):
        train(task, tmp_path, Surroundings())


def test_a_metric_that_is_a_parameter_is_refused(tmp_path):
    def loss(model, rows):
        return {"loss": model(rows[:, :-1]).square().mean(), "scale": model.scale}

    def make():
        model = gpt_task().model()
        model.scale = torch.nn.Parameter(torch.ones(()))
        model.register_forward_hook(lambda module, inputs, output: output * module.scale)
        return model

    with pytest.raises(TaskError, match="the metric 'scale' is the parameter"):
        train(gpt_task(strategy=spill(), model=make, loss=loss), tmp_path, Surroundings())


# ---- disks ----


def halted_task(tmp_path, steps=8):
    task = gpt_task(strategy=spill(shards=4), steps=steps, valid_every=None, checkpoint_every=2)
    assert isinstance(train(task, tmp_path, Surroundings(halt_after=4)), Halted)
    return task


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_fails_the_task_clearly_and_the_last_commit_stands(tmp_path, tight, monkeypatch, call):
    tight["room"] = 1.3
    task = halted_task(tmp_path)
    original = getattr(os, call)
    left = 60

    def failing(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC if call == "pwrite" else errno.EIO, "broken")
        return original(*args)

    monkeypatch.setattr(os, call, failing)
    advice = "make room on the disk" if call == "pwrite" else "check the disk and the system's log"
    then = rf"{advice}, then run `rota resume --failed \S+`"
    with pytest.raises(TaskError, match=rf"^\S+ cannot be (written to|read from) \S+ \(broken\); {then}$"):
        train(task, tmp_path, Surroundings(), attempt=2)
    monkeypatch.undo()
    surroundings = Surroundings()
    assert isinstance(train(replace(task, strategy="single"), tmp_path, surroundings, attempt=3), Finished)
    first = plain.train(task).history
    assert [surroundings.rows[step] for step in sorted(surroundings.rows)] == first[-len(surroundings.rows) :]


def committed_file(folder, ending, record="commit.json"):
    """The file of an item that a commit refers to."""
    items = json.loads((folder / record).read_text().partition("\n")[2])["items"]
    item = next(name for name in items if name.endswith(ending))
    return folder / f"{item}.{items[item][0]}"


def flip(file):
    data = bytearray(file.read_bytes())
    data[100] ^= 16
    file.write_bytes(data)


def a_moment_flips(folder):
    flip(committed_file(folder, "moments"))


def a_weight_is_cut_short(folder):
    file = committed_file(folder, "weights")
    os.truncate(file, file.stat().st_size - 4096)


def the_rest_is_gone(folder):
    committed_file(folder, "rest").unlink()


def the_record_is_garbage(folder):
    (folder / "commit.json").write_bytes(b"\xff\x00garbage")


def a_number_of_the_record_changes(folder):
    text = (folder / "commit.json").read_text()
    assert '"step": 5' in text
    (folder / "commit.json").write_text(text.replace('"step": 5', '"step": 4'))


DAMAGES = [
    (a_moment_flips, "was altered since it was written"),
    (a_weight_is_cut_short, "bytes that were committed"),
    (the_rest_is_gone, "cannot be read: No such file"),
    (the_record_is_garbage, "commit.json was altered"),
    (a_number_of_the_record_changes, "commit.json was altered"),
]


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """Copies a task that was halted after five steps into a folder; it is trained once. Gives what it measured."""
    folder, first = tmp_path_factory.mktemp("halted") / "task", Listening(halt_after=5)

    def copied(task, to):
        if not folder.exists():  # not before, since budgets are tight for a test at a time
            folder.mkdir()
            assert train(task, folder, first) == Halted(task="gpt", attempt=1, step=5)
        shutil.copytree(folder, to, dirs_exist_ok=True)
        return first

    return copied


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_where_the_last_commit_is_damaged_the_one_before_it_is_used(damage, sentence, tmp_path, halted):
    task = gpt_task(strategy=spill(shards=4), steps=8, valid_every=None, checkpoint_every=2)
    first = halted(task, tmp_path)
    damage(tmp_path / "shards")
    again = Listening()
    assert isinstance(train(task, tmp_path, again, attempt=2), Finished)
    told = next(text for text in again.notices if "damaged" in text)
    assert sentence in told
    assert "set aside as commit.json.damaged, and the one before it is used" in told
    assert again.from_step == 4
    assert_equals_plain(task, tmp_path, first.rows | again.rows)


def test_where_no_commit_is_whole_training_begins_anew(tmp_path):
    task = gpt_task(strategy=spill(shards=4), steps=6, valid_every=None, checkpoint_every=2)
    assert isinstance(train(task, tmp_path, Listening(halt_after=5)), Halted)
    the_record_is_garbage(tmp_path / "shards")
    flip(committed_file(tmp_path / "shards", "weights", "commit-before.json"))
    again = Listening()
    assert isinstance(train(task, tmp_path, again, attempt=2), Finished)
    told = [text for text in again.notices if "damaged" in text]
    assert ["the one before it is used" in text for text in told] == [True, False]
    assert "there is no other, so training begins anew" in told[1]
    assert_equals_plain(task, tmp_path, again.rows)


def test_a_task_that_was_thought_to_fit_and_does_not_is_offered_to_spill(tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise TaskError("the optimizer ran out of memory") from MemoryError()

    timed, calls = probe.timed, []

    def first_failing(*args, **kwargs):
        calls.append(args)
        return failing() if len(calls) == 1 else timed(*args, **kwargs)

    monkeypatch.setattr(probe, "timed", first_failing)
    sight = probe.look(
        gpt_task(), device=torch.device("cpu"), counts=(1,), memory_bytes=MEMORY, folder=tmp_path, known=dict
    )
    assert [(one.label, one.devices, one.measured) for one in sight.estimates] == [("spill", 1, True)]
    assert sight.notices == ("single: the optimizer ran out of memory",)
    assert 0 < sight.estimates[0].compute_s < sight.estimates[0].step_s * 1.5
    assert sight.estimates[0].moves_s > 0


@pytest.mark.parametrize(
    "host_bytes",
    [pytest.param(0, marks=pytest.mark.deep), 2**18, 2**30],
    ids=["no host", "a small host", "a large host"],
)
def test_by_way_of_a_host_it_equals_the_plain_loop(host_bytes, tmp_path, monkeypatch):
    """As on a GPU, with the host in its place: through a validation, a halt and what was saved."""
    room_of = one_device.room_of
    monkeypatch.setattr(
        loop_module, "room_of", lambda *given, **named: replace(room_of(*given, **named), host_bytes=host_bytes)
    )
    task = gpt_task(strategy=spill(shards=4, activations="spill"), accumulate=2, steps=12)
    surroundings = Surroundings(halt_after=7)
    assert isinstance(train(task, tmp_path, surroundings), Halted)
    surroundings.halt_after = None
    assert isinstance(train(task, tmp_path, surroundings, attempt=2), Finished)
    assert_equals_plain(task, tmp_path, surroundings.rows)


def test_a_parameter_that_no_op_reads_stays_as_it_is(tmp_path):
    def make():
        model = GPT(vocabulary=32, context=16, width=16, depth=2, heads=2)
        model.unused = torch.nn.Linear(3, 3)
        return model

    task = gpt_task(model=make, strategy=spill(shards=4), steps=4)
    surroundings = Surroundings()
    assert isinstance(train(task, tmp_path, surroundings), Finished)
    assert_equals_plain(task, tmp_path, surroundings.rows)


def test_a_model_that_cannot_be_put_on_disk_leaves_no_thread(tmp_path, monkeypatch):
    settle = spilling.Holdings.settle

    def settles_and_fails(self, release):
        settle(self, release)
        raise FullDiskError("there is no room left on the disk")

    monkeypatch.setattr(spilling.Holdings, "settle", settles_and_fails)
    task = gpt_task(strategy=spill())
    with pytest.raises(TaskError, match="no room left") as caught:
        train(task, tmp_path, Listening())
    assert caught.traceback  # which keeps what was made
    assert not [one.name for one in threading.enumerate() if one.name.startswith("rota-")]


class Asking(torch.nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).tanh() if torch.compiler.is_compiling() else super().forward(inputs)


@pytest.mark.parametrize(("kind", "told"), [(Asking, True), (torch.nn.Linear, False)])
def test_a_model_that_asks_whether_it_is_traced_may_differ_and_the_run_says_so(kind, told, tmp_path):
    task = Task(
        name="a",
        model=lambda: kind(4, 2),
        data=lambda: Data(train=torch.ones(8, 4), batch_size=4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        steps=1,
        strategy=spill(),
    )
    surroundings = Listening()
    train(task, tmp_path, surroundings)
    assert any("asks whether it is being traced" in notice for notice in surroundings.notices) == told
