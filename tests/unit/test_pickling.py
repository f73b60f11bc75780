"""Tasks travel to their workers, with whatever their functions refer to."""

import pickle

import torch

from rota.pickling import pickle_task


def test_functions_that_touch_the_settings_of_torchs_backends_can_travel():
    def model(width):
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        assert torch.backends.mkldnn.is_available() in (True, False)
        return torch.nn.Linear(width, 1)

    made = pickle.loads(pickle_task(lambda: model(3)))()
    assert made.weight.shape == (1, 3)


def test_closures_lambdas_and_classes_of_the_main_program_can_travel():
    class Net(torch.nn.Linear):
        def __init__(self, width):
            super().__init__(width, 1)

    assert pickle.loads(pickle_task(lambda: Net(4)))().in_features == 4
