"""What the commands print that need no run."""

import json
import subprocess
import sys

import pytest

import rota


def call(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-m", "rota", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_help_lists_every_command_with_a_whole_sentence(tmp_path):
    done = call("--help", folder=tmp_path)
    assert done.returncode == 0
    for command in ("run", "plan", "simulate", "explain", "devices", "status", "resume", "stop", "report", "doctor"):
        (line,) = (line for line in done.stdout.splitlines() if line.split()[:1] == [command])
        assert line.endswith("."), line
        assert not line.endswith("..."), line


def test_devices_and_doctor_print_json(tmp_path):
    devices = json.loads(call("devices", "--json", folder=tmp_path).stdout)["devices"]
    assert [device["name"] for device in devices] == [device.name for device in rota.local().devices]
    doctor = call("doctor", "--json", folder=tmp_path)
    assert json.loads(doctor.stdout)["ok"] is (doctor.returncode == 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "missing.py"), "there is no file missing.py"),
        (("run", "empty.py"), "empty.py defines no rota.Sweep"),
        (("run", "two.py"), "two.py defines several sweeps; say which"),
        (("run", "two.py:three"), "there is no three"),
        (("run", "broken.py"), "broken.py, line 2: "),
        (("run", "raising.py"), "raising.py, line 3, raised ZeroDivisionError: division by zero"),
        (("run", "names.py"), "names.py: task name '../x' cannot be used"),
        (("run", "empty.py", "--devices", "0"), "devices must be a whole number of at least 1"),
        (("run", "empty.py", "--memory", "lots"), "'lots' is not a size"),
        (
            ("run", "empty.py", "--memory", "1KiB"),
            "1 KiB of memory is too little for any task; give each device at least 8",
        ),
        (("run", "one.py", "--memory", "20MiB", "--strategy", "spill"), "give each device more than 24 MiB (--memory)"),
        (
            ("run", "one.py", "--memory", "20MiB", "--strategy", "pool"),
            "task 'a' cannot run as pool: 20 MiB of memory is",
        ),
        (("run", "empty.py", "--retries", "-1"), "retries must be a whole number of at least 0"),
        (("status",), "there is no run in runs"),
        (("resume", "gone"), "there is no run 'gone'"),
        (("run", "empty.py", "--bogus"), "No such option"),
        (("bogus",), "No such command"),
    ],
)
def test_wrong_input_is_one_sentence_and_code_two(command, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    task = "rota.Task(name='a', model=int, data=int, loss=int, optimizer=int, steps=1)"
    files = {
        "empty.py": "x = 1\n",
        "two.py": f"import rota\none = rota.Sweep(tasks=[{task}])\ntwo = rota.Sweep(tasks=[{task}])\n",
        "one.py": f"import rota\nsweep = rota.Sweep(tasks=[{task}])\n",
        "broken.py": "x = 1\ny = (\n",
        "raising.py": "def f():\n    pass\n1 / 0\n",
        "names.py": f"import rota\nsweep = rota.Sweep(tasks=[{task.replace(chr(39) + 'a' + chr(39), repr('../x'))}])\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, _, told = command(*arguments)
    assert code == 2
    assert sentence in told
    assert "Traceback" not in told
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == sorted(files)
