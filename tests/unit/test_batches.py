"""Batches of training and validation data: the particular datasets, and what is said when one is not usable."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from rota.errors import InputError
from rota.runtime.batches import IterableCursor, MapCursor, training_cursor, validation_batches
from rota.task import Data


def no_notice(text):
    raise AssertionError(f"unexpected notice: {text}")


def take(cursor, count):
    return [cursor.next() for _ in range(count)]


class Again:
    """An iterable that can be iterated again and has neither a length nor a state."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class SizedAgain(Again):
    def __len__(self):
        return len(self.items)


# ---- which cursor ----


@pytest.mark.parametrize("dataset", [[1, 2], torch.zeros(2), TensorDataset(torch.zeros(2))])
def test_a_dataset_with_an_index_gets_a_map_cursor(dataset):
    assert isinstance(training_cursor(Data(train=dataset, batch_size=1), seed=0), MapCursor)


@pytest.mark.parametrize("dataset", [Again([1]), iter([1]), DataLoader([1, 2])])
def test_anything_else_gets_an_iterable_cursor(dataset):
    assert isinstance(training_cursor(Data(train=dataset), seed=0), IterableCursor)


# ---- datasets with an index ----


def test_samples_are_collated_as_torch_does():
    dataset = TensorDataset(torch.arange(4), torch.arange(4) * 10)
    (x, y), size = MapCursor(Data(train=dataset, batch_size=2, shuffle=False), seed=0).next()
    assert (x.tolist(), y.tolist(), size) == ([0, 1], [0, 10], 2)


def test_an_own_collate_gets_the_samples_in_order():
    data = Data(train="abcde", batch_size=2, shuffle=False, collate="".join)
    assert take(MapCursor(data, seed=0), 4) == [("ab", 2), ("cd", 2), ("e", 1), ("ab", 2)]


def test_a_dataset_that_fetches_many_at_once_is_asked_once_a_batch():
    class Bulk:
        asked: list[list[int]] = []  # noqa: RUF012

        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            self.asked.append(indices)
            return indices

    data = Data(train=Bulk(), batch_size=2, shuffle=False, collate=list)
    assert take(MapCursor(data, seed=0), 2) == [([0, 1], 2), ([2, 3], 2)]
    assert Bulk.asked == [[0, 1], [2, 3]]


def test_a_subset_is_read_by_its_own_indices():
    data = Data(train=Subset(torch.arange(10), [7, 3, 5]), batch_size=3, shuffle=False)
    assert MapCursor(data, seed=0).next()[0].tolist() == [7, 3, 5]


def test_the_order_depends_on_the_seed_and_on_nothing_else():
    data = Data(train=list(range(50)), batch_size=50, collate=list)
    torch.manual_seed(1)
    first = MapCursor(data, seed=5).next()
    torch.manual_seed(2)
    assert MapCursor(data, seed=5).next() == first
    assert MapCursor(data, seed=6).next() != first


def test_epochs_differ_from_each_other():
    cursor = MapCursor(Data(train=list(range(50)), batch_size=50, collate=list), seed=5)
    assert cursor.next() != cursor.next()


def test_drawing_the_order_leaves_the_generators_of_training_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    take(MapCursor(Data(train=list(range(5)), batch_size=2), seed=0), 9)
    assert torch.equal(torch.rand(3), expected)


def test_going_to_a_position_reads_no_sample():
    class Costly(list):
        reads = 0

        def __getitem__(self, index):
            Costly.reads += 1
            return super().__getitem__(index)

    data = Data(train=Costly(range(100)), batch_size=2)
    cursor = MapCursor(data, seed=0)
    cursor.load_state_dict({"epoch": 3, "batch": 40, "length": 100}, no_notice)
    assert Costly.reads == 0
    cursor.next()
    assert Costly.reads == 2


def test_a_dataset_that_changed_its_length_is_said(make_task):
    cursor = MapCursor(Data(train=list(range(10)), batch_size=2), seed=0)
    take(cursor, 4)
    shorter = MapCursor(Data(train=list(range(6)), batch_size=2, collate=list), seed=0)
    notices = []
    shorter.load_state_dict(cursor.state_dict(), notices.append)
    assert len(notices) == 1
    assert "6 samples now" in notices[0]
    assert "had 10" in notices[0]
    assert sorted(sample for batch, _ in take(shorter, 3) for sample in batch) == list(range(6))


@pytest.mark.parametrize(
    ("length", "size", "drop_last", "batches"),
    [(6, 2, False, 3), (7, 2, False, 4), (7, 2, True, 3), (2, 2, True, 1), (1, 1, False, 1)],
)
def test_the_batches_of_an_epoch_are_counted(length, size, drop_last, batches):
    data = Data(train=[0] * length, batch_size=size, drop_last=drop_last)
    assert MapCursor(data, seed=0).batches_per_epoch == batches
    data = Data(train=SizedAgain([0] * length), batch_size=size, drop_last=drop_last)
    assert IterableCursor(data).batches_per_epoch == batches


def test_whole_batches_of_a_sized_iterable_are_counted_one_by_one():
    assert IterableCursor(Data(train=SizedAgain([0] * 5))).batches_per_epoch == 5
    assert IterableCursor(Data(train=DataLoader(torch.zeros(10), batch_size=4))).batches_per_epoch == 3


def test_an_iterable_without_a_length_has_no_count():
    assert IterableCursor(Data(train=Again([1]), batch_size=1)).batches_per_epoch is None


# ---- iterables ----


def test_an_iterable_is_taken_in_its_own_order_and_begun_again():
    cursor = IterableCursor(Data(train=Again("abcde"), batch_size=2, collate="".join))
    assert take(cursor, 5) == [("ab", 2), ("cd", 2), ("e", 1), ("ab", 2), ("cd", 2)]


def test_a_small_last_batch_of_an_iterable_can_be_dropped():
    cursor = IterableCursor(Data(train=Again("abcde"), batch_size=2, collate="".join, drop_last=True))
    assert take(cursor, 4) == [("ab", 2), ("cd", 2), ("ab", 2), ("cd", 2)]


def test_whole_batches_are_passed_on_as_they_are():
    batches = [torch.zeros(3), "text", None]
    cursor = IterableCursor(Data(train=Again(batches)))
    assert [batch for batch, _ in take(cursor, 3)] == batches


def test_no_sample_is_read_ahead_of_the_batch_that_needs_it():
    read = []

    class Counting:
        def __iter__(self):
            for i in range(10):
                read.append(i)
                yield i

    cursor = IterableCursor(Data(train=Counting(), batch_size=3))
    cursor.next()
    assert read == [0, 1, 2]


def test_an_empty_iterable_is_refused(refused):
    assert "empty" in refused(IterableCursor(Data(train=Again([]), batch_size=2)).next)
    assert "empty" in refused(IterableCursor(Data(train=Again([]))).next)


def test_a_generator_that_is_used_up_is_refused_at_the_second_epoch_with_advice(refused):
    cursor = IterableCursor(Data(train=(i for i in range(4)), batch_size=2))
    take(cursor, 2)
    sentence = refused(cursor.next)
    assert "used up" in sentence
    assert "more than once" in sentence
    assert "fewer steps" in sentence
    assert "used up" in refused(cursor.next)


def test_an_iterable_smaller_than_a_batch_that_drops_the_last_is_not_called_empty(refused):
    sentence = refused(IterableCursor(Data(train=Again([1, 2]), batch_size=3, drop_last=True)).next)
    assert "batch_size" in sentence


def test_an_iterable_that_became_shorter_is_refused_at_resume(refused):
    cursor = IterableCursor(Data(train=Again(range(8)), batch_size=2))
    take(cursor, 3)
    shorter = IterableCursor(Data(train=Again(range(4)), batch_size=2))
    sentence = refused(shorter.load_state_dict, cursor.state_dict(), lambda text: None)
    assert "shorter" in sentence


def test_resuming_by_skipping_is_said_with_the_number_of_batches():
    cursor = IterableCursor(Data(train=Again(range(8)), batch_size=2))
    take(cursor, 3)
    notices = []
    IterableCursor(Data(train=Again(range(8)), batch_size=2)).load_state_dict(cursor.state_dict(), notices.append)
    assert len(notices) == 1
    assert "no state_dict" in notices[0]
    assert "3 batches" in notices[0]


def test_resuming_at_the_very_beginning_skips_nothing_and_says_nothing():
    state = IterableCursor(Data(train=Again(range(8)), batch_size=2)).state_dict()
    fresh = IterableCursor(Data(train=Again(range(8)), batch_size=2, collate=list))
    fresh.load_state_dict(state, no_notice)
    assert fresh.next() == ([0, 1], 2)


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class SizedStream(Unsized):
    def __len__(self):
        return 6


def test_a_loader_of_a_stream_without_a_length_can_be_trained_on():
    cursor = training_cursor(Data(train=DataLoader(Unsized(), batch_size=2)), seed=0)
    assert cursor.batches_per_epoch is None
    assert cursor.next()[0].tolist() == [0, 1]


def test_a_stream_with_a_length_can_be_trained_on():
    cursor = training_cursor(Data(train=SizedStream(), batch_size=2), seed=0)
    assert cursor.next()[0].tolist() == [0, 1]
    assert cursor.batches_per_epoch == 3


class OwnOrder:
    """Shuffles itself, differently in each epoch, as loaders of other libraries do."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(12, generator=generator).tolist())


def continues_exactly(make, *, split, total):
    """Whether saving after `split` batches and going on in a fresh cursor gives what one cursor gives."""
    whole = [batch for batch, _ in take(training_cursor(make(), seed=0), total)]
    first = training_cursor(make(), seed=0)
    head = [batch for batch, _ in take(first, split)]
    state = first.state_dict()
    second = training_cursor(make(), seed=0)
    second.load_state_dict(state, lambda text: None)
    return str(head + [batch for batch, _ in take(second, total - split)]) == str(whole)


def test_an_iterable_that_orders_itself_anew_each_epoch_continues_in_its_epoch():
    assert continues_exactly(lambda: Data(train=OwnOrder(), batch_size=4), split=2, total=9)
    assert continues_exactly(lambda: Data(train=OwnOrder(), batch_size=4), split=4, total=9)


def test_a_loader_that_does_not_shuffle_continues_exactly():
    for split in range(9):
        assert continues_exactly(lambda: Data(train=DataLoader(torch.arange(12), batch_size=4)), split=split, total=9)


class TellsOnly(Again):
    """Keeps its position, which its iterators can tell and not take; only the iterable itself takes it back."""

    position = 0

    def __iter__(self):
        outer = self

        class Iterator:
            def __iter__(self):
                return self

            def __next__(self):
                if outer.position == len(outer.items):
                    outer.position = 0
                    raise StopIteration
                outer.position += 1
                return outer.items[outer.position - 1]

            def state_dict(self):
                return outer.state_dict()

        return Iterator()

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_an_iterator_that_cannot_take_its_state_back_leaves_that_to_the_iterable():
    assert continues_exactly(lambda: Data(train=TellsOnly(range(8)), batch_size=2), split=2, total=6)


# ---- validation ----


def test_validation_takes_the_data_in_order_and_keeps_the_last_batch():
    data = Data(train="xy", valid="abcde", batch_size=2, collate="".join, drop_last=True)
    assert list(validation_batches(data)) == [("ab", 2), ("cd", 2), ("e", 1)]


def test_validation_may_have_its_own_batch_size():
    data = Data(train="xy", valid="abcde", batch_size=2, valid_batch_size=4, collate="".join)
    assert list(validation_batches(data)) == [("abcd", 4), ("e", 1)]


def test_validation_of_an_iterable_is_batched_too_and_can_be_repeated():
    data = Data(train="xy", valid=Again("abcde"), batch_size=2, collate="".join)
    for _ in range(2):
        assert list(validation_batches(data)) == [("ab", 2), ("cd", 2), ("e", 1)]


def test_validation_of_an_iterable_of_whole_batches_counts_each_as_one():
    data = Data(train=Again(["x"]), valid=Again(["ab", "c"]))
    assert list(validation_batches(data)) == [("ab", 1), ("c", 1)]


def test_validation_does_not_touch_the_training_cursor():
    data = Data(train=list(range(6)), valid=[7, 8], batch_size=2, collate=list)
    expected = take(MapCursor(data, seed=0), 6)
    cursor = MapCursor(data, seed=0)
    got = []
    for _ in range(6):
        got.append(cursor.next())
        list(validation_batches(data))
    assert got == expected


def test_an_error_of_the_dataset_is_not_hidden():
    class Broken:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        MapCursor(Data(train=Broken(), batch_size=1), seed=0).next()
    with pytest.raises(InputError):
        Data(train=Broken(), batch_size=4)
