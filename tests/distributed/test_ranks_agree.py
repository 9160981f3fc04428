"""The handshake over a store in this process, with one thread per rank: all continue, or all raise the same error."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from hf_rocm.distributed import agree as module
from hf_rocm.distributed.agree import agree, named
from hf_rocm.distributed.environment import Place
from hf_rocm.errors import OverlayError, RankError

SAME = {"torch": "2.9", "aiter": "not installed"}


@pytest.fixture(autouse=True)
def first_call(monkeypatch):
    monkeypatch.setattr(module, "_calls", {})


def ranks_with(fact_functions, *, timeout=60.0, store=None, delays=None):
    """The result of each rank's handshake: None or its error. A rank without facts does not join."""
    store, results = store or HashStore(), {}
    ranks = list(range(len(fact_functions)))

    def run(rank):
        time.sleep((delays or {}).get(rank, 0))
        try:
            agree(
                store,
                Place(rank, len(fact_functions), rank),
                ranks,
                fact_functions[rank],
                timeout=timeout,
                hint="do this",
            )
            results[rank] = None
        except RankError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks if fact_functions[rank] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def raises(error):
    def find():
        raise error

    return find


def test_ranks_with_the_same_facts_continue_repeatedly():
    store = HashStore()
    for _ in range(3):
        assert ranks_with([lambda: SAME] * 4, store=store) == dict.fromkeys(range(4))


def test_every_rank_raises_the_same_error_with_the_values_that_differ():
    store = HashStore()
    ranks_with([lambda: SAME] * 4, store=store)
    other = {**SAME, "aiter": "amd-aiter 0.1.5"}
    results = ranks_with([lambda: SAME, lambda: other, lambda: other, lambda: SAME], store=store)
    assert len({str(error) for error in results.values()}) == 1
    error = results[0]
    assert error.message == "the ranks would not run the same model; they differ in: aiter"
    assert error.facts["aiter"].startswith("not installed on ranks 0, 3 (")
    assert "amd-aiter 0.1.5 on ranks 1–2 (" in error.facts["aiter"]
    assert error.hint == "do this" and list(error.facts) == ["aiter"]


def test_a_fact_that_one_rank_lacks_is_a_difference():
    results = ranks_with([lambda: SAME, lambda: {"torch": "2.9"}])
    assert "absent on rank 1" in results[0].facts["aiter"]


def test_many_differences_are_counted():
    results = ranks_with([lambda n=n: {f"overlay of {i}": str(n) for i in range(20)} for n in range(2)])
    assert len(results[1].facts) == module._SHOWN + 1 and results[1].facts["and"] == "14 more"


@pytest.mark.parametrize("error", [ValueError("no such GPU"), OverlayError("the file was edited", hint="reinstall")])
def test_if_one_rank_fails_the_others_raise_at_once(error):
    began = time.monotonic()
    results = ranks_with([lambda: SAME, raises(error), lambda: SAME])
    assert time.monotonic() - began < 30, "a rank waited until the time limit"
    assert len({str(error) for error in results.values()}) == 1
    assert results[0].message.startswith("rank 1 (") and str(error.args[0]) in results[0].message
    assert "failed before the model was loaded" in results[0].message
    assert results[1].__cause__ is error and results[0].__cause__ is None


def test_missing_ranks_are_named():
    results = ranks_with([lambda: SAME, None, lambda: SAME, None], timeout=2.0)
    assert sorted(results) == [0, 2] and str(results[0]) == str(results[2])
    assert results[0].message == "ranks 1, 3 did not join the other ranks to load the model"
    assert results[0].facts["joined"] == "ranks 0, 2" and "HF_ROCM_RANKS_TIMEOUT" in results[0].hint


def test_a_late_rank_raises_the_same_error():
    results = ranks_with([lambda: SAME, lambda: SAME], timeout=1.0, delays={1: 4.0})
    assert str(results[0]) == str(results[1]) and "rank 1 did not join" in results[1].message


def test_a_lost_store_raises_an_hf_rocm_error():
    class LostStore(HashStore):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    results = ranks_with([lambda: SAME, None], store=LostStore())
    assert (
        "lost its connection to the rendezvous store" in results[0].message
        and "Connection reset" in results[0].facts["torch error"]
    )


def test_the_rank_with_the_store_waits_until_the_others_have_read_it():
    store, gone = HashStore(), threading.Event()

    class SlowStore:
        """A slow store that is lost when the first rank ends."""

        def __getattr__(self, name):
            time.sleep(0.2)
            if gone.is_set():
                raise RuntimeError("Connection reset by peer")
            return getattr(store, name)

    def first():
        with pytest.raises(RankError):
            agree(store, Place(0, 2, 0), [0, 1], lambda: SAME, timeout=60, hint="")
        gone.set()

    thread = threading.Thread(target=first)
    thread.start()
    with pytest.raises(RankError, match="they differ in: torch"):
        agree(SlowStore(), Place(1, 2, 1), [0, 1], lambda: {**SAME, "torch": "2.8"}, timeout=60, hint="")
    thread.join()
    assert gone.is_set()


def test_ranks_are_written_as_ranges_with_their_hosts():
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert named([2], hosts) == "rank 2 (b)"
    assert named([3, 0, 1], hosts) == "ranks 0–1, 3 (a, b)"
    assert named([1, 2], {}) == "ranks 1–2"
