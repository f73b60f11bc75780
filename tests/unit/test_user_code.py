"""What the user's code raises becomes one sentence with its place, and a traceback of their frames alone."""

from __future__ import annotations

import os

import pytest
import torch

import rota
from rota.errors import DivergedError, InputError, PeerError, TaskError
from rota.runtime.user_code import calling, is_out_of_memory

OURS = os.path.dirname(os.path.abspath(rota.__file__ or rota.__path__[0] + "/x"))


def failure(function, what="the model factory"):
    with pytest.raises(TaskError) as caught, calling(what):
        function()
    return caught.value


def from_file(filename, body="raise ValueError('boo')"):
    """A function that lives in a file of this name."""
    namespace: dict = {}
    exec(compile(f"def function():\n    {body}\n", filename, "exec"), namespace)
    return namespace["function"]


def test_code_that_raises_nothing_is_left_alone():
    with calling("the model factory"):
        value = 3
    assert value == 3


def test_the_sentence_names_what_was_called_the_error_and_the_place():
    error = failure(from_file("/home/me/sweep.py"))
    assert str(error) == "the model factory raised ValueError: boo (sweep.py, line 2)"
    assert 'File "/home/me/sweep.py", line 2' in error.traceback
    assert error.traceback.endswith("ValueError: boo\n")


def test_the_place_is_in_this_file_when_the_code_is():
    def broken():
        raise KeyError("width")

    error = failure(broken)
    line = broken.__code__.co_firstlineno + 1
    assert f"(test_user_code.py, line {line})" in str(error)
    assert "KeyError: 'width'" in str(error)


def test_an_error_inside_a_library_is_placed_where_the_user_called_it():
    def broken():
        torch.nn.Linear(2, 3)(torch.zeros(1, 5))

    error = failure(broken)
    assert f"(test_user_code.py, line {broken.__code__.co_firstlineno + 1})" in str(error)
    assert "site-packages" not in error.traceback.splitlines()[-3]


def test_the_traceback_has_no_frames_of_rota():
    def broken():
        with calling("the data factory"):
            from_file("/home/me/sweep.py")()

    assert OURS + os.sep not in failure(broken).traceback


def test_an_error_of_several_lines_becomes_one_sentence():
    error = failure(from_file("/home/me/sweep.py", "raise ValueError('first\\n   second')"))
    assert "\n" not in str(error)
    assert "ValueError: first second" in str(error)
    assert "first\n" in error.traceback


def test_an_error_that_quotes_a_whole_model_is_cut_short_and_kept_in_the_traceback():
    with pytest.raises(TaskError) as caught, calling("the loss function"):
        raise TypeError("not " + "Linear() " * 500)
    assert len(str(caught.value)) < 600
    assert str(caught.value).count("Linear() ") > 20
    assert caught.value.traceback.count("Linear() ") >= 500


def test_an_error_without_a_text_is_still_named():
    assert "raised StopIteration" in str(failure(from_file("/home/me/sweep.py", "raise StopIteration")))


def test_a_sentence_of_rota_keeps_its_words():
    def broken():
        raise InputError("rota.Data: the train dataset is empty; give at least one sample")

    error = failure(broken, "the data factory")
    assert str(error) == "the data factory: rota.Data: the train dataset is empty; give at least one sample"


def test_task_errors_pass_through_unchanged():
    original = DivergedError("the loss became nan at step 3", step=3)

    def broken():
        raise original

    assert failure(broken) is original


def test_interrupts_are_not_the_users_errors():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), calling("the model factory"):
        interrupted()


def test_code_that_exits_is_an_error_of_the_task():
    assert "SystemExit" in str(failure(from_file("/home/me/sweep.py", "raise SystemExit(2)")))


@pytest.mark.parametrize("folder", ["_experiments", "-sweeps"])
def test_a_users_folder_whose_name_begins_like_rotas_is_the_users(folder):
    error = failure(from_file(f"{OURS}{folder}/sweep.py"))
    assert "(sweep.py, line 2)" in str(error)


def test_a_users_file_with_contextlib_in_its_path_is_the_users():
    assert "line 2" in str(failure(from_file("/home/me/contextlib_tricks/sweep.py")))


# ---- memory ----


def test_running_out_of_memory_is_said_with_what_to_do():
    error = failure(from_file("/home/me/sweep.py", "raise MemoryError"), "the loss function")
    assert str(error).startswith("the loss function ran out of memory (sweep.py, line 2)")
    assert "smaller model or batch" in str(error)


def test_torchs_own_failure_to_allocate_is_recognised():
    def broken():
        torch.empty(2**60)

    assert "ran out of memory (test_user_code.py" in str(failure(broken))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA out of memory."), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory of days past"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, expected):
    assert is_out_of_memory(error) is expected


def test_that_another_process_is_gone_is_not_the_fault_of_the_users_code():
    with pytest.raises(PeerError, match="is gone"), calling("the loss function"):
        raise PeerError("another process of the task is gone")
