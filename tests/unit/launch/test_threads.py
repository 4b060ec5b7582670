"""The division of a machine's cores among the processes of a run."""

from __future__ import annotations

import pytest

from rftcore.launch.threads import divide_threads


@pytest.mark.parametrize(("cores", "explorer", "trainer"), [(1, 1, 1), (2, 2, 2), (7, 7, 7), (8, 4, 4), (17, 8, 9)])
def test_few_cores_are_shared_and_many_are_divided(
    cores: int, explorer: int, trainer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads = divide_threads(cores)
    assert (threads.explorer, threads.trainer) == (explorer, trainer)


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("0", 16), ("", 16), ("3,2", 3), ("²", 16)])
def test_a_number_of_threads_in_the_environment_is_kept(
    given: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    threads = divide_threads(32)
    assert threads.explorer == threads.trainer == expected
    assert ("OMP_NUM_THREADS" in threads.sentence) == given.startswith("3")
