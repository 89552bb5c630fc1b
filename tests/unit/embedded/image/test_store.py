"""Files of images: what is durable when an upload is published."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from micronova.embedded.image.store import DirectorySync


def test_a_change_is_durable_only_by_an_fsync_that_begins_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait while one runs share the next one."""
    running, go_on = threading.Semaphore(0), threading.Semaphore(0)
    synced: list[int] = []
    changed = 0

    def fsync(_file: int) -> None:
        running.release()
        assert go_on.acquire(timeout=30)
        synced.append(changed)

    monkeypatch.setattr(os, "fsync", fsync)
    sync = DirectorySync(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        changed = 1
        first = pool.submit(sync.changed)
        assert running.acquire(timeout=30)
        changed = 4
        others = [pool.submit(sync.changed) for _ in range(3)]
        while sync.changes < 4:
            os.sched_yield()
        assert not any(each.done() for each in (first, *others)), "the first fsync has begun before their changes"
        go_on.release()
        first.result(timeout=30)
        assert running.acquire(timeout=30)
        assert not any(each.done() for each in others)
        go_on.release()
        for each in others:
            each.result(timeout=30)
    assert len(synced) == 2
