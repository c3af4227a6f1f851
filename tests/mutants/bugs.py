"""The bugs: what is changed in which file, and the tests that find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A bug that somebody could write.

    Attributes:
        name: for the table and the command line.
        file: the source file, from the root of the tree.
        old: text that is in the file once.
        new: what stands there with the bug.
        tests: arguments of pytest; one of these tests has to fail.
        why: what a user would lose.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    @property
    def is_rust(self) -> bool:
        """Return whether the extension has to be built."""
        return self.file.startswith("rust/")


MUTANTS = [
    Mutant(
        "at-work-ignored",
        "python/dcp_rs/steps/folder_store.py",
        "if isinstance(found, SkippedStep) and found.is_left:",
        "if found:",
        ("tests/steps/test_folder_steps.py",),
        "A save that begins between the look and the lock loses its folder.",
    ),
    Mutant(
        "lock-not-taken",
        "python/dcp_rs/steps/folder_store.py",
        "lock = _core.FolderLock(left.path)  # while",
        "lock = None  # while",
        ("tests/steps/test_folder_steps.py",),
        "A folder is removed while another process commits to it.",
    ),
    Mutant(
        "newest-step-removed",
        "python/dcp_rs/steps/retention.py",
        "sorted(steps, key=lambda step: step.age)[-count:]}",
        "sorted(steps, key=lambda step: step.age)[:count]}",
        ("tests/steps/test_steps_policies.py",),
        "Retention keeps the oldest steps and removes the newest.",
    ),
    Mutant(
        "view-of-the-mapping",
        "python/dcp_rs/dcp/load_planner.py",
        'return value.clone() if device.type == "cpu" else value',
        "return value",
        ("tests/dcp/test_load_planner.py",),
        "A tensor that was handed out changes when the file is overwritten.",
    ),
    Mutant(
        "rounded-twice",
        "python/dcp_rs/engine/writes.py",
        "yield place, narrow(tensor, offsets, place.shape).resolve_conj().resolve_neg()",
        "source = narrow(tensor, offsets, place.shape).resolve_conj().resolve_neg()\n"
        "        yield place, source.half() if source.dtype == torch.float32 else source",
        ("tests/dcp/test_save_casts.py",),
        "A cast from float32 goes through float16, and loses bits that the wanted dtype has.",
    ),
    Mutant(
        "error-swallowed",
        "python/dcp_rs/engine/ranks.py",
        "        if not failures:\n            return\n",
        "        if not failures or self._error is None:\n            return\n",
        ("tests/dcp/test_together.py",),
        "The ranks that did not fail go on as if all were well.",
    ),
    Mutant(
        "rename-backwards",
        "python/dcp_rs/checkpoint/names.py",
        'news = {old.removesuffix("."): new.removesuffix(".") for old, new in rename.items()}',
        'news = {new.removesuffix("."): old.removesuffix(".") for old, new in rename.items()}\n    olds = list(news)',
        ("tests/dcp/test_load_rename.py",),
        "A mapping of names is applied from the new names to the old ones.",
    ),
    Mutant(
        "staged-without-a-copy",
        "python/dcp_rs/transfer/stage.py",
        "self.values[name] = _like(value, view)",
        "self.values[name] = value",
        ("tests/transfer/test_stage.py",),
        "A save in the background writes what training has changed by then.",
    ),
    Mutant(
        "shard-of-another-placement",
        "python/dcp_rs/tensors/shards.py",
        "key = (tensor.shape, tensor.device_mesh, tuple(coordinate), tensor.placements)",
        "key = (tensor.shape, tensor.device_mesh, tuple(coordinate))",
        ("tests/dcp/test_save_planner_ranks.py",),
        "A shard is saved at the coordinates of another tensor of the same shape.",
    ),
    Mutant(
        "damaged-checkpoint-does-not-exist",
        "python/dcp_rs/checkpoint/locate.py",
        "    except DcpRsError:  # damaged, or of a later version\n        pass\n    return True\n",
        "    except DcpRsError:\n        return False\n    return True\n",
        ("tests/checkpoint/test_exists.py",),
        "A run whose last checkpoint is damaged begins at step 1, and saves over it.",
    ),
    Mutant(
        "zeros-compared-by-value",
        "python/dcp_rs/tensors/equality.py",
        "return torch.equal(raw_bytes(one), raw_bytes(other))",
        "return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)",
        ("tests/tensors/test_equality.py",),
        "A comparison takes -0.0 for 0.0, and any NaN for any other.",
    ),
    Mutant(
        "last-element-dropped",
        "python/dcp_rs/tensors/regions.py",
        "in unflatten(sizes[1:], 0, flat[rows * inner :]):",
        "in unflatten(sizes[1:], 0, flat[rows * inner : -1]):",
        ("tests/dcp/test_save_casts.py",),
        "The last element of a run that ends within a row is not written.",
    ),
    Mutant(
        "slice-too-short",
        "python/dcp_rs/tensors/regions.py",
        "extent = max(0, stop - start)",
        "extent = max(0, (stop - start) // step * step)",
        ("tests/checkpoint/test_open_slices.py",),
        "A slice with a step lacks its last row.",
    ),
    Mutant(
        "file-left-open",
        "python/dcp_rs/checkpoint/open.py",
        "        self._closed = True\n        self._files = {}\n",
        "        self._closed = True\n",
        ("tests/dcp/test_open_files.py",),
        "A checkpoint that was closed keeps its files mapped.",
    ),
    Mutant(
        "wrong-stride",
        "python/dcp_rs/transfer/upload.py",
        "source = view.as_strided(tensor.shape, tensor.stride(), first)",
        "source = view.as_strided(tensor.shape, tensor.stride()[::-1], first)",
        ("tests/dcp/test_load_planner.py",),
        "A tensor that is cast on its way comes back transposed.",
    ),
    Mutant(
        "commit-before-the-sync",
        "rust/core/src/store/publish.rs",
        "        if fsync {\n            disk.sync(&file, &temporary, control)?;\n        }\n        control.check()?;\n"
        "        disk.rename(&temporary, &dir.join(file_name))\n",
        "        control.check()?;\n        let renamed = disk.rename(&temporary, &dir.join(file_name));\n"
        "        if fsync {\n            disk.sync(&file, &temporary, control)?;\n        }\n        renamed\n",
        ("tests/crash/test_crash.py",),
        "After a loss of power the index may be empty.",
    ),
    Mutant(
        "descriptor-leaked",
        "rust/core/src/store/publish.rs",
        "    published?;\n    if fsync {",
        "    published?;\n    std::mem::forget(file);\n    if fsync {",
        ("tests/dcp/test_open_files.py",),
        "Every save leaves a descriptor, until the process may open no more.",
    ),
    Mutant(
        "digest-of-the-first-block",
        "rust/core/src/read/verify.rs",
        "catalog.digest(first + block)",
        "catalog.digest(first + block / 2)",
        ("tests/checkpoint/test_bad_data_files.py",),
        "Blocks are compared with the digests of others.",
    ),
    # Slices that `open` hands out are views of a mapping: loads into shards are what copies rows.
    Mutant(
        "row-from-the-wrong-place",
        "rust/core/src/copy/run.rs",
        "let (to, from) = (dst.add(i * inner.dst), src.add(i * inner.src));",
        "let (to, from) = (dst.add(i * inner.dst), src.add(i * inner.src.min(inner.dst)));",
        ("tests/dcp/test_sharding_matrix.py",),
        "Rows of a column shard come from the wrong places.",
    ),
    Mutant(
        "chunk-ends-early",
        "rust/core/src/read/plan.rs",
        "Piece { src: at, dst: run.dst + (at - run.src),",
        "Piece { src: if to == end && at > run.src { at - 1 } else { at }, dst: run.dst + (at - run.src),",
        ("tests/dcp/test_threads.py",),
        "The last piece of a chunk is read from one byte before its place.",
    ),
    Mutant(
        "store-commit-unconditional",
        "rust/core/src/checkpoint/commit_remote.rs",
        "        if begun.keeps_conditions { Condition::Unchanged } else { Condition::Unguarded };\n"
        "    put_and_look(path, bytes, condition, connection, control)\n",
        "        Condition::Unguarded;\n    put_and_look(path, bytes, condition, connection, control)\n",
        ("tests/stores/test_commit.py",),
        "Of two jobs that save to one place the slower one replaces what it never saw.",
    ),
]
