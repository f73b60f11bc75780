"""Calls commands in this process, as the tests of the command line do."""

import sys

import pytest

from rota.cli import main


@pytest.fixture
def command(capsys):
    """Returns a function of a command's arguments that gives its exit code, output and errors."""

    def call(*arguments):
        path, modules = list(sys.path), set(sys.modules)
        try:
            with pytest.raises(SystemExit) as ended:
                main([str(one) for one in arguments])
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.startswith("rota_sweep_"):
                    del sys.modules[name]
        done = capsys.readouterr()
        return ended.value.code, done.out, done.err

    return call
