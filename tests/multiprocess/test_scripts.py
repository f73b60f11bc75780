"""A sweep made in a script or at a prompt runs, resumes and gives its models back; lambdas and closures work."""

import os
import subprocess
import sys

SCRIPT = """
import torch, rota

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(3, width)
    def forward(self, x):
        return super().forward(x) if x is None else self.layer(x)

def task(lr, width):
    scale = 2.0
    return rota.Task(
        name=f"net-{lr}-{width}",
        model=lambda: Net(width),
        data=lambda: rota.Data(train=torch.eye(3), valid=torch.eye(3), batch_size=2),
        loss=lambda model, batch: {"loss": (model(batch) * scale).square().mean(), "width": width},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=STEPS, valid_every=2)

sweep = rota.grid(task, lr=[0.1, 0.01], width=[2, 4])
result = rota.run(sweep, out="run", progress=False)
best = result.best("valid/loss")
print(result.table())
print("best", best.name, best.settings)
print("steps", [row["step"] for row in result.history(best)])
model = result.load(best)
print("loads", type(model).__name__, model.training, tuple(model.layer.weight.shape))
from safetensors.torch import load_file
print("strict", Net(best.settings["width"]).load_state_dict(load_file(best.model_path)))
print("attempts", sorted({task.attempt for task in result.record.tasks.values()}))
"""


ANOTHER = """
import sys
try:
    exec(TEXT)
except rota.RotaError as error:
    print(error, file=sys.stderr)
"""


def at_the_prompt(folder, text):
    """Run code that lies in no file, as in a notebook."""
    return subprocess.run(
        [sys.executable, "-"], input=text, cwd=folder, capture_output=True, text=True, timeout=110, env=os.environ
    )


def test_a_sweep_from_the_prompt_runs_and_resumes_by_running_it_again(tmp_path):
    first = at_the_prompt(tmp_path, SCRIPT.replace("STEPS", "5"))
    assert first.returncode == 0, first.stderr
    assert "best net-0.1-" in first.stdout
    assert "steps [1, 2, 3, 4, 5]" in first.stdout
    assert "loads Net False" in first.stdout
    assert "strict <All keys matched successfully>" in first.stdout
    assert first.stderr == ""

    # And three more at one prompt.
    text = SCRIPT.replace("STEPS", "5")
    other = ANOTHER.replace("TEXT", repr(text.replace("net-", "web-")))
    again = at_the_prompt(tmp_path, text + other + text.replace("scale = 2.0", "scale = 3.0"))
    assert again.stdout == first.stdout, "nothing is trained twice"
    assert "holds the run of another sweep" in again.stderr
    assert again.returncode == 1
    assert "the sweep has changed since the run in run began" in again.stderr


def test_modules_beside_the_sweep_file_can_be_imported(cli, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_models.py").write_text("import torch\n\n\ndef net():\n    return torch.nn.Linear(2, 1)\n")
    (project / "sweep.py").write_text(
        "import torch, rota\n"
        "from my_models import net\n"
        "sweep = rota.Sweep(tasks=[rota.Task(name='net', model=net, steps=2,\n"
        "    data=lambda: rota.Data(train=torch.ones(4, 2), batch_size=2),\n"
        "    loss=lambda model, batch: model(batch).mean(),\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))])\n"
    )
    done = cli.run("run", "project/sweep.py", "--out", "run")
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_run_from_a_thread_works(tmp_path):
    script = (
        SCRIPT.replace("STEPS", "2")
        .partition("best =")[0]
        .replace(
            'result = rota.run(sweep, out="run", progress=False)',
            "import threading\n"
            "thread = threading.Thread(target=lambda: print(rota.run(sweep, out='run', progress=False)))\n"
            "thread.start(); thread.join()",
        )
    )
    done = at_the_prompt(tmp_path, script)
    assert "4 finished" in done.stdout, done.stderr
