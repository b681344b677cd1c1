"""The conformance table: its short form, and that a wrong cell would be seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from conforming import cells, compare, environments, fake_devices, report, section, states  # noqa: E402
from conforming.scene import Scene, quiet  # noqa: E402
from conforming.verdict import (  # noqa: E402
    CHECKPOINT,
    EXACT,
    REFUSED,
    WRONG,
    Cell,
    DidNotHappen,
    Finding,
    worst,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    quiet()
    yield
    torch.set_num_threads(before)


def row(name: str, *operations: str) -> dict[str, Cell]:
    families, chosen = cells.chosen([name], operations)
    return {cell.operation: cell for cell in cells.cells_of(families[0], chosen)}


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_going_on_and_back_is_exact_or_from_a_checkpoint(name: str) -> None:
    found = row(name, "resume", "fork", "rollback", "edited", "exact-prompt", "shorter")
    assert len(found) == 12
    for cell in found.values():
        assert cell.verdict in (EXACT, CHECKPOINT), f"{cell.operation}: {cell.reason}"
        assert cell.max_abs_logit_error is not None and cell.max_abs_logit_error <= compare.MOST_FP32
    assert found["rollback past the window"].verdict == (EXACT if name == "Llama" else CHECKPOINT)


@pytest.mark.parametrize("name", ["gpt-oss", "BLOOM"])
def test_what_transformers_refuses_is_its_refusal(name: str) -> None:
    cell = row(name, "sdpa")["sdpa"]
    assert cell.verdict == REFUSED and cell.by_transformers and "does not support" in cell.reason


def test_an_error_that_is_not_the_one_of_transformers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scene: Scene, session: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(Scene, "say", fail)
    families, operations = cells.chosen(["Mamba"], ["draft"])
    assert "stateful" in cells.failure_of_stock(families[0], operations[0])
    cell = row("Mamba", "draft")["draft-model decoding"]
    assert (cell.verdict, cell.reason) == (WRONG, "RuntimeError: something else")


def test_an_edited_message_goes_through_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = Scene.ask

    def noted(scene: Scene, session: Any, messages: Any) -> Any:
        asked.append(len(messages))
        return ask(scene, session, messages)

    monkeypatch.setattr(Scene, "ask", noted)
    cell = row("Llama", "edited")["edited message"]
    assert (cell.verdict, asked) == (EXACT, [1, 3, 5, 3, 1, 3, 5, 3])


# A wrong cell is seen


def test_one_flipped_bit_of_a_restored_tensor_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from tieredkv.prefix import Prefix

    gather_into = Prefix.gather_into

    def spoiled(prefix: Prefix, outs: Any) -> None:
        gather_into(prefix, outs)
        outs[2, "values"][1, 5].view(torch.int32)[3] ^= 1

    monkeypatch.setattr(Prefix, "gather_into", spoiled)
    cell = row("Llama", "resume after restart")["resume after restart"]
    assert cell.verdict == WRONG and "layer 2 values" in cell.reason


def test_tokens_that_came_from_elsewhere_did_not_come_from_disk(tmp_path: Path) -> None:
    families, _ = cells.chosen(["Llama"], ())
    with Scene(families[0], tmp_path, families[0].build()) as scene:
        from conforming.operations import resuming

        with scene.open().session("talk") as session:
            turns = scene.converse(session, 1)
            turn = scene.say(session, scene.following(turns[-1].tokens, 20, 70))
        with pytest.raises(DidNotHappen, match="not from the disk"):
            resuming.check_tier(turn, "disk")


def test_logits_of_another_prefix_are_wrong(tmp_path: Path) -> None:
    families, _ = cells.chosen(["Llama"], ())
    with Scene(families[0], tmp_path, families[0].build()) as scene:
        chat = scene.open()
        with chat.session("one") as session:
            turns = scene.converse(session, 1)
            turn = scene.say(session, scene.following(turns[-1].tokens, 20, 70))
        with chat.session("two") as session:
            others = scene.converse(session, 1, seed=4)
        found = compare.judge(scene, others, turn, compare.Wanted(turns[-1].tokens.shape[1] - 1))
    assert found.verdict == WRONG and found.max_abs_logit_error > compare.MOST_FP32


def test_the_first_difference_is_named() -> None:
    one = {(0, "keys"): torch.arange(6.0).view(1, 1, 3, 2)}
    assert not states.first_difference(one, {(0, "keys"): one[0, "keys"][:, :, 1:]}), (
        "a longer window is right"
    )
    assert "not restored" in states.first_difference({}, one)
    assert "float64" in states.first_difference(one, {(0, "keys"): one[0, "keys"].double()})
    other = {(0, "keys"): one[0, "keys"].clone()}
    other[0, "keys"][0, 0, 0, 0] = 2.0
    assert states.first_difference(one, other) == "layer 0 keys: differs by 2.0e+00"


# The report


def test_the_worst_of_several_looks_counts() -> None:
    looks = [Finding(EXACT, 1e-6, ""), Finding(CHECKPOINT, 3e-6, "48 of 64"), Finding(EXACT, 2e-6, "")]
    assert worst(looks) == Finding(CHECKPOINT, 3e-6, "48 of 64")
    assert worst([*looks, Finding(WRONG, None, "no")]) == Finding(WRONG, 3e-6, "no")


def test_figures_count_what_must_not_be() -> None:
    table = [
        Cell("Llama", "fork", EXACT, 1e-6, ""),
        Cell("Llama", "beams", REFUSED, None, "ours"),
        Cell("gpt-oss", "sdpa", REFUSED, None, "transformers: no", by_transformers=True),
        Cell("Mamba", "fork", REFUSED, None, "ours"),
        Cell("Mamba", "beams", REFUSED, None, "ours"),
        Cell("RWKV", "fork", REFUSED, None, "transformers: no cache", by_transformers=True),
        Cell("GPT-2", "fork", WRONG, 1.0, "layer 0"),
    ]
    found = {figure.name: figure for figure in report.figures(table)}
    assert found["cells_that_are_wrong_num"].value == 1 and not found["cells_that_are_wrong_num"].met
    refused = found["refused_attention_cells_num"]
    assert (refused.value, refused.met, refused.detail) == (1, False, "Llama: beams")
    assert found["recurrent_cells_below_checkpoint_num"].detail == "Mamba: fork"
    assert found["recurrent_cells_that_transformers_refuses_num"].detail == "RWKV: fork"


def test_the_section_is_written_between_its_marks_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{section.BEGIN}\nold\n{section.END}\nafter\n")
    section.write_section(readme, "new")
    assert readme.read_text() == f"before\n{section.BEGIN}\n\nnew\n\n{section.END}\nafter\n"
    readme.write_text(f"{section.END} {section.BEGIN}")
    with pytest.raises(ValueError, match="must hold"):
        section.write_section(readme, "new")


def test_the_section_says_where_an_older_release_differs() -> None:
    table = [
        Cell("Llama", "fork", EXACT, 1e-6, "", transformers="5.24"),
        Cell("gpt-oss", "fork", REFUSED, None, "why not", transformers="5.24"),
        Cell("Llama", "fork", WRONG, 1.0, "layer 0 keys", transformers="5.9"),
        Cell("gpt-oss", "fork", REFUSED, None, "why not", transformers="5.9"),
        Cell("Llama", "fork", EXACT, 1e-6, "", transformers="5.8"),
    ]
    text = section.section(table)
    assert "The marks are those of transformers 5.24." in text
    assert "- 5.24: 2 cells: 1 exact, 1 refused." in text and "- 5.9: 2 cells: 1 refused, 1 wrong." in text
    assert "- 5.8: 1 cells: 1 exact; not yet: gpt-oss." in text
    assert "| Llama | ● |" in text and "| gpt-oss | – |" in text
    assert "- gpt-oss: fork. *refused: why not*" in text
    assert "Otherwise in 5.9:\n\n- Llama: fork. *wrong: layer 0 keys*" in text


# Where it runs


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    assert environments.environment(environments.installed(), tmp_path) is None
    (tmp_path / "transformers-5.20").mkdir()
    assert environments.environment("5.20", tmp_path) == tmp_path / "transformers-5.20"


def test_processes_hand_on_cells_as_they_come_and_one_that_fails_is_heard() -> None:
    names = ["Llama", "Mistral, sliding", "Qwen3"]
    found = list(environments.run_all(None, names, ["fork"], num_jobs=2))
    assert sorted((cell.family, cell.verdict) for cell in found) == [(name, EXACT) for name in sorted(names)]
    with pytest.raises(environments.ChildFailed, match="nothing is called 'nonsense'"):
        list(environments.run_all(None, ["nonsense"], ["fork"], num_jobs=1))


def test_fake_devices_refuse_what_real_ones_refuse() -> None:
    one, other, here = fake_devices.FIRST, fake_devices.SECOND, torch.device("cpu")
    with fake_devices.FakeDevices():
        a, b, c = torch.ones(3, device=one), torch.ones(3, device=other), torch.ones(3)
        assert (a.device, b.device, c.device) == (one, other, here)
        assert (a + 1).device == one and a[1:].device == one and torch.zeros_like(b).device == other
        for bad in (lambda: a + b, lambda: torch.cat([a, c]), lambda: torch.equal(b, c)):
            with pytest.raises(RuntimeError, match="same device"):
                bad()
        with pytest.raises(TypeError, match="copy it to the CPU"):
            a.numpy()
        assert torch.equal(a.to(other), b) and a.cpu().numpy().sum() == 3
        moved = a.to(other)
        moved.zero_()
        assert a.sum() == 3, "a move is a copy"
        a.copy_(torch.full((3,), 5.0, device=other))
        a[0] = b[0]
        assert a.tolist() == [1.0, 5.0, 5.0] and a.device == one
    assert torch.ones(2).device == here


def test_names_are_found_by_their_beginnings() -> None:
    families, operations = cells.chosen(["gemma 3"], ["roll"])
    assert [family.name for family in families] == ["Gemma 3"], "an exact name is that one alone"
    assert len(operations) == 4
    with pytest.raises(ValueError, match="nothing is called"):
        cells.chosen(["nonsense"], ())
