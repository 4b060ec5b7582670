"""Checkpoints and exports of the learner: training continues the same after a restart, and a folder is complete or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftcore.algorithms import build_algorithm
from rftcore.trainer.checkpoints import CheckpointWriter, HostMemory, remove_abandoned
from rftcore.trainer.network.sharding import Grid
from rftdata.errors import ConfigError, DiskFullError, ModelError, RftError
from tests.support.learning import config, make_batch, make_learner, save_model, weights
from tests.support.weights import weights_of


class TestCheckpoint:
    @pytest.mark.parametrize("tied", [True, False])
    def test_four_updates_equal_two_a_restart_and_two(self, tmp_path: Path, tied: bool) -> None:
        path = str(save_model(tmp_path / "model", tied=tied))
        settings = config(warmup_steps=3, optimizer={"name": "adamw", "weight_decay": 0.01})
        through = make_learner(path, settings, build_algorithm("grpo"), 7)
        metrics = [through.update(make_batch(step), step) for step in (1, 2, 3, 4)]

        first = make_learner(path, settings, build_algorithm("grpo"), 7)
        for step in (1, 2):
            first.update(make_batch(step), step)
        first.save_checkpoint(tmp_path / "step-2")
        second = make_learner(path, settings, build_algorithm("grpo"), 8)
        second.load_checkpoint(tmp_path / "step-2")
        assert second.step == 2
        resumed = [second.update(make_batch(step), step) for step in (3, 4)]

        expected, found = weights(through), weights(second)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        for name in ("loss", "grad_norm", "entropy", "learning_rate"):
            assert [entry[name] for entry in resumed] == [entry[name] for entry in metrics[2:]]

    @pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
    def test_moments_of_another_optimizer_are_refused_or_reset(
        self, model_path: str, tmp_path: Path, before: str, after: str
    ) -> None:
        first = make_learner(model_path, config(optimizer=before), build_algorithm("grpo"), 0)
        first.update(make_batch(1), 1)
        first.save_checkpoint(tmp_path / "c")
        with pytest.raises(
            ConfigError, match=rf"of another optimizer for \d+ of \d+ parameters .*{after}.*on_change: reset"
        ):
            make_learner(model_path, config(optimizer=after), build_algorithm("grpo"), 0).load_checkpoint(
                tmp_path / "c"
            )

        settings = config(optimizer={"name": after, "on_change": "reset"})
        learner = make_learner(model_path, settings, build_algorithm("grpo"), 0)
        learner.load_checkpoint(tmp_path / "c")
        kept = learner.policy.optimizers.state()
        assert kept and "model.layers.0.mlp.up_proj.weight" not in {key.rpartition("/")[0] for key in kept}
        assert learner.update(make_batch(2), 2)["skipped"] == 0
        learner.save_checkpoint(tmp_path / "d")
        expected = learner.policy.optimizers.state()
        learner.load_checkpoint(
            tmp_path / "d"
        )  # `reset` stays in the configuration, and takes nothing of the new optimizer
        found = learner.policy.optimizers.state()
        assert found.keys() == expected.keys() and all(
            torch.equal(found[key], value) for key, value in expected.items()
        )

    def test_further_training_does_not_change_the_folder(self, model_path: str, tmp_path: Path) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        learner.update(make_batch(1), 1)
        learner.save_checkpoint(tmp_path / "c")
        learner.load_checkpoint(tmp_path / "c")
        before = _digests(tmp_path / "c")
        learner.update(make_batch(2), 2)
        assert _digests(tmp_path / "c") == before

    def test_folder_is_a_model_folder_and_holds_no_pickle(self, model_path: str, tmp_path: Path) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        learner.update(make_batch(1), 1)
        learner.save_checkpoint(tmp_path / "c")
        assert (tmp_path / "c" / "tokenizer.json").is_file()
        assert {path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file()} == {".json", ".safetensors"}
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
        expected = weights(learner)
        assert all(torch.equal(expected[name], tensor) for name, tensor in opened.named_parameters())
        make_learner(str(tmp_path / "c"), config(), build_algorithm("grpo"), 0).update(make_batch(1), 1)

    def test_can_be_overwritten(self, model_path: str, tmp_path: Path) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        for step in (1, 2):
            learner.update(make_batch(step), step)
            learner.save_checkpoint(tmp_path / "c")
        learner.load_checkpoint(tmp_path / "c")
        assert learner.step == 2
        assert [path.name for path in tmp_path.iterdir()] == ["c"]

    @pytest.mark.parametrize("kept_bytes", [HostMemory.KEPT_BYTES, 0])
    def test_each_has_its_own_state_in_memory_that_is_used_again(
        self, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
    ) -> None:
        monkeypatch.setattr(HostMemory, "KEPT_BYTES", kept_bytes)
        expected, moments = [], []
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        for step in (1, 2, 3):
            learner.update(make_batch(step), step)
            expected.append(weights(learner))
            moments.append({name: value.clone() for name, value in learner.policy.optimizers.state().items()})
            learner.begin_checkpoint(tmp_path / str(step))
        learner.writer.end()
        for step in (1, 2, 3):
            learner.load_checkpoint(tmp_path / str(step))
            found = learner.policy.optimizers.state()
            assert all(torch.equal(value, expected[step - 1][name]) for name, value in weights(learner).items())
            assert all(torch.equal(value, found[name]) for name, value in moments[step - 1].items())

    def test_has_the_state_of_the_moment_when_it_was_begun(self, model_path: str, tmp_path: Path) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        learner.update(make_batch(1), 1)
        learner.save_checkpoint(tmp_path / "whole")
        learner.begin_checkpoint(tmp_path / "beside")
        learner.update(make_batch(2), 2)
        learner.writer.end()
        assert _digests(tmp_path / "beside") == _digests(tmp_path / "whole")
        assert len(_digests(tmp_path / "whole")) > 4

    def test_a_full_disk_leaves_no_folder(self, model_path: str, tmp_path: Path) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        learner.update(make_batch(1), 1)
        learner.save_checkpoint(tmp_path / "before")
        sizes = sorted(path.stat().st_size for path in (tmp_path / "before").rglob("*.safetensors"))
        # The optimizer's file is twice as large as the model's: only it does not fit.
        limit = (sizes[-2] + sizes[-1]) // 2
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(RftError, match=r"rank 0 cannot write its part of the checkpoint: .*File too large"):
                learner.save_checkpoint(tmp_path / "c")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["before"]
        learner.save_checkpoint(tmp_path / "c")
        assert _digests(tmp_path / "c") == _digests(tmp_path / "before")

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_failed_write_leaves_no_folder(self, tmp_path: Path, code: int) -> None:
        def fill(folder: Path, grid: Grid) -> None:
            (folder / "half").write_text("x")
            raise OSError(code, os.strerror(code))

        writer = CheckpointWriter(Grid(torch.device("cpu")))
        writer.begin(tmp_path / "c", fill)
        with pytest.raises(DiskFullError, match="free space"):
            writer.end()
        assert not writer.has_written
        assert list(tmp_path.iterdir()) == []

    def test_unneeded_folders_of_earlier_attempts_are_removed(self, tmp_path: Path) -> None:
        kept = ["attempt-1-step-000001", "attempt-3-step-000004.draft", "attempt-4-step-000009", "attempt-best", "mine"]
        for name in (*kept, "attempt-1-step-000002", "attempt-2-step-000003.draft"):
            (tmp_path / name).mkdir()
        remove_abandoned(tmp_path, 3, {"attempt-1-step-000001"})
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
        assert remove_abandoned(tmp_path / "no-checkpoint-yet", 3, ()) == []

    def test_a_folder_that_is_no_checkpoint_is_refused(self, model_path: str, tmp_path: Path) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        with pytest.raises(ModelError, match="cannot be read"):
            learner.load_checkpoint(tmp_path)
        learner.update(make_batch(1), 1)  # and the learner is still whole


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_weights_file_holds_every_weight_and_the_output_head(tmp_path: Path, tied: bool) -> None:
    learner = make_learner(str(save_model(tmp_path, tied=tied)), config(), build_algorithm("grpo"), 0)
    exported = weights_of(learner)
    assert set(exported) == {*dict(learner.policy.model.named_parameters()), "lm_head.weight"}
    same = torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    assert same is tied


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path"):
        make_learner(str(tmp_path / "nowhere"), config(), build_algorithm("grpo"), 0)
