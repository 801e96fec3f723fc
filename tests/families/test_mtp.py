"""MTP heads of Qwen3.5 and Qwen3-Next: what they compute, and answers with their drafts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from inspection import draft_with, drafts_of, used_blocks
from matrix import usable
from mtp_checks import GREEDY, SAMPLED, check_preempted_and_shifting, check_same, watch_drafts
from rounded_weights import round_weights
from safetensors.numpy import load_file, save_file
from tiny_gguf import FILES, PLUS_ONE, VOCABULARY, convert, qwen35, stacked, with_vocabulary
from tiny_models import make, save_tokenizer

from edgellm.backends.batch import Span
from edgellm.backends.mtp import MtpModel
from edgellm.cache.kv_cache import KVCache
from edgellm.cli.main import edgellm
from edgellm.engine.mtp import MtpDrafter, MtpHead
from edgellm.errors import BundleError, ModelFormatError
from edgellm.export import export
from edgellm.graphs.checkpoint import open_checkpoint
from edgellm.llm import LLM, load
from edgellm.store.bundle import open_bundle
from edgellm.store.manifest import MANIFEST

pytestmark = pytest.mark.skipif(not usable("C++"), reason="states need the C++ kernels")

TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 400).tolist()
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
HEAD = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
COMBINE, NORMS = (
    "mtp.fc.weight",
    ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
)


@dataclass(frozen=True)
class Judge:
    """The published forward of the head, in float64; with experts in float32.

    Attributes:
        model: the whole model.
        layer: a model of the head's layer and final norm alone.
        extra: what is in front of them.
    """

    model: Any
    layer: Any
    extra: dict[str, np.ndarray]

    @property
    def experts(self) -> bool:
        return has_experts(self.model)

    def rows(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What enters the layer for each token but the first, and the model's hidden states."""
        import torch

        with torch.no_grad():
            hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        return self.combined(tokens[1:], hidden[:-1]), hidden

    def combined(self, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        embedded = self.model.get_input_embeddings().weight.detach().numpy()[list(tokens)]
        halves = [
            x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + self.extra[norm])
            for x, norm in zip((embedded, hidden), NORMS, strict=True)
        ]
        return np.asarray(np.concatenate(halves, -1) @ self.extra[COMBINE].T, embedded.dtype)

    def states(self, rows: np.ndarray) -> np.ndarray:
        """Hidden states behind the head's final norm."""
        import torch

        with torch.no_grad():
            return np.asarray(
                self.layer.model(inputs_embeds=torch.tensor(rows[None])).last_hidden_state[0]
            )

    def draft(self, rows: np.ndarray, count: int) -> list[int]:
        """The likeliest tokens behind the one of the last row."""
        head = self.model.get_output_embeddings().weight.detach().numpy()
        found = list[int]()
        for _ in range(count):
            last = self.states(rows)[-1]
            found.append(int((head @ last).argmax()))
            rows = np.concatenate([rows, self.combined(found[-1:], last[None])])
        return found


def has_experts(model: Any) -> bool:
    return hasattr(model.config, "num_experts")


def add_head(folder: Path, scratch: Path, *, family: str, copies: bool) -> Judge:
    """Write a head into the folder of a model: random, or one that is always right.

    The latter stands behind a model whose layers add nothing, so that the last token alone tells
    the next one: it passes the embedding on.
    """
    import torch

    torch.manual_seed(1)
    sizes = {**SIZES, **FILES.get(family, (0, 0, {}))[2]}  # the head's layer has experts too
    model = make(family, folder, **sizes)
    layer = make(family, scratch, **sizes, **HEAD)
    width = model.config.hidden_size
    extra = {COMBINE: torch.randn(width, 2 * width) / (2 * width) ** 0.5}
    extra |= {name: 0.3 * torch.randn(width) for name in NORMS}
    if copies:
        with torch.no_grad():
            for key, weight in (*model.named_parameters(), *layer.named_parameters()):
                if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    weight.zero_()
            layer.model.norm.weight.copy_(model.model.norm.weight)
        extra = {name: torch.zeros(width) for name in NORMS}
        extra[COMBINE] = torch.eye(width, 2 * width)
    holder = torch.nn.ParameterDict({COMBINE.replace(".", "_"): extra[COMBINE]})
    holder.config = model.config
    for each in (model, layer, holder):
        round_weights(each)
    extra[COMBINE] = holder[COMBINE.replace(".", "_")].detach()
    for each, path in ((model, folder), (layer, scratch)):
        each.save_pretrained(path)
    save_tokenizer(folder)
    arrays = {name: each.numpy() for name, each in extra.items()}
    if not has_experts(model):  # PyTorch has no experts in float64
        model, layer = model.double(), layer.double()
    return Judge(model, layer, arrays)


def head_tensors(judge: Judge, scratch: Path) -> dict[str, np.ndarray]:
    """The tensors of the head under the names of its model's folder."""
    layer = load_file(scratch / "model.safetensors")
    own = {
        key.replace("model.", "mtp.", 1): values
        for key, values in layer.items()
        if key == "model.norm.weight" or key.startswith("model.layers.")
    }
    return own | judge.extra


def folder_with_head(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    keys = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def file_with_head(
    folder: Path, tensors: dict[str, np.ndarray], *, family: str, own_norm: bool = True
) -> Path:
    arch, keys, _ = FILES.get(family, (gguf.MODEL_ARCH.QWEN35, qwen35, {}))
    name = gguf.MODEL_ARCH_NAMES[arch]
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, layers + 1)
    layer = {
        key.replace("mtp.layers.0", f"model.layers.{layers}"): values
        for key, values in tensors.items()
        if key.startswith("mtp.layers")
    }
    nextn = {"enorm": NORMS[0], "hnorm": NORMS[1], "eh_proj": COMBINE}
    if own_norm:
        nextn["shared_head_norm"] = "mtp.norm.weight"
    if "nextn.embed_tokens" in tensors:
        nextn["embed_tokens"] = "nextn.embed_tokens"

    def add(writer: gguf.GGUFWriter) -> None:
        with_vocabulary(keys)(writer)
        writer.kv_data[0].pop(f"{name}.block_count")
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
        for key, values in stacked(layer).items():
            stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(stored, values + (key.endswith("norm.weight") and arch in PLUS_ONE))
        for part, key in nextn.items():
            values = tensors[key]
            writer.add_tensor(f"blk.{layers}.nextn.{part}.weight", values + (values.ndim == 1))

    return convert(folder, folder / "m.gguf", arch, add)


CASES = [
    *(("qwen3_5_text", "folder"), ("qwen3_5_text_even", "file"), ("qwen3_5_moe_text", "folder")),
    *(("qwen3_5_moe_text", "file"), ("qwen3_next", "folder"), ("qwen3_next", "file")),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Judge]:
    return made(tmp_path_factory, *request.param, copies=False)


@pytest.fixture(scope="module")
def plain_case(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Judge]:
    return made(tmp_path_factory, *CASES[0], copies=False)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory, "qwen3_5_text", "folder", copies=True)[0]


def made(
    tmp_path_factory: pytest.TempPathFactory, family: str, form: str, *, copies: bool
) -> tuple[str, Judge]:
    folder, scratch = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("head")
    judge = add_head(folder, scratch, family=family, copies=copies)
    tensors = head_tensors(judge, scratch)
    path = (
        folder_with_head(folder, tensors)
        if form == "folder"
        else file_with_head(folder, tensors, family=family)
    )
    return str(export(path, folder / "bundle", name="tiny", source=str(path)).path), judge


def head_of(llm: LLM) -> MtpHead:
    head = llm.engine.draft_model
    assert isinstance(head, MtpHead)
    return head


def cache_of(head: MtpHead) -> KVCache:
    assert head.cache is not None
    return head.cache


def hidden_states(llm: LLM, tokens: Sequence[int]) -> np.ndarray:
    sequence = llm.engine.cache.sequence()
    (rows,) = llm.engine.decoder.run([Span(sequence, tokens)])
    sequence.close()
    return rows.hidden


def test_the_head_is_the_published_one(case: tuple[str, Judge]) -> None:
    path, judge = case
    tokens = TOKENS[:150]
    rows, hidden = judge.rows(tokens)
    expected = judge.states(rows)
    with load(path, kv_format="f32") as llm:
        head = head_of(llm)

        def compute() -> np.ndarray:
            sequence = cache_of(head).sequence()
            near = hidden.astype(np.float32)
            parts = [
                head.model.run(sequence, tokens[a + 1 : b + 1], near[a:b])[0]
                for a, b in ((0, 1), (1, 70), (70, 149))
            ]
            sequence.close()
            return np.concatenate(parts)

        found = llm.engine.thread.call(compute)
    errors = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    assert np.median(errors) < 0.03
    if not judge.experts:  # where another expert is nearly as good
        assert errors.max() < 0.1


def test_drafts_are_those_of_the_published_head(
    case: tuple[str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row with the hidden state before it, whatever was accepted; its own behind the end."""
    path, judge = case
    seen = watch_drafts(monkeypatch, MtpDrafter)
    with load(path, kv_format="f32", draft_p_min=0) as llm, llm.session() as session:
        for begin in (0, 100):  # the second turn begins in the KV cache
            session.append(TOKENS[begin : begin + 20])
            session.generate(**(GREEDY | {"max_tokens": 6}))
        text = list(session.tokens)
    found = [token for _, draft in seen for token in draft]
    rows, _ = judge.rows(text)
    expected = []
    for tokens, draft in seen:
        assert tokens == text[: len(tokens)]
        expected += judge.draft(rows[: len(tokens) - 1], len(draft))
    assert len(found) > 20
    assert np.mean(np.equal(found, expected)) > 0.8


@pytest.mark.parametrize(
    "options", [SAMPLED, pytest.param(GREEDY, marks=pytest.mark.slow)], ids=["sampled", "greedy"]
)
def test_the_answer_is_the_same(case: tuple[str, Judge], options: dict[str, Any]) -> None:
    check_path(case[0], options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_answer_is_the_same_with_drafts_that_are_right(
    right: str, options: dict[str, Any]
) -> None:
    check_path(right, options)


def check_path(path: str, options: dict[str, Any]) -> None:
    with load(path, draft_p_min=0) as llm:
        check_same(llm, TOKENS, options)
        assert used_blocks(drafts_of(llm)) == 0


def test_a_head_that_is_right_is_accepted(right: str) -> None:
    """In chats as well, whose next turn begins in the KV cache; and where it saw no beginning."""
    with load(right, draft_p_min=0) as llm, pytest.MonkeyPatch.context() as patch:
        draft_with(patch, "mtp")
        with llm.session() as session:
            for begin in (0, 130, 270):
                session.append(TOKENS[begin : begin + 100])
                counts = session.generate(**GREEDY).stats.drafts["mtp"]
                assert counts.accepted > 0.8 * counts.drafted > 15


@pytest.mark.parametrize("forgets", [False, True])
def test_where_an_answer_begins_in_the_kv_cache(right: str, forgets: bool) -> None:
    """The head has all rows of the turns before; else it begins behind what was found."""
    firsts = []
    with load(right, draft_p_min=0) as llm, pytest.MonkeyPatch.context() as patch:
        draft_with(patch, "mtp")
        begin = MtpDrafter._begin

        def noting(self: MtpDrafter, tokens: Sequence[int], start: int) -> None:
            if forgets:
                head_of(llm)._ends.clear()
            begin(self, tokens, start)
            firsts.append((start, self._first))
            assert self._end == start

        patch.setattr(MtpDrafter, "_begin", noting)
        texts = []
        for turn in range(3):
            prompt = [*(texts[-1] if texts else []), *TOKENS[turn * 100 : turn * 100 + 100]]
            texts.append([*prompt, *llm.generate(prompt, **GREEDY).tokens])
        for text in texts[::-1]:  # in the prefix of another answer, at the end of a block
            llm.generate([*text[:140], 9, 9], **GREEDY)
        assert used_blocks(drafts_of(llm)) == 0
    starts = [start for start, _ in firsts[:3]]
    assert starts in ([0, 129, 259], [0, 130, 260])
    assert [first for _, first in firsts[:3]] == (starts if forgets else [0, 0, 0])


def test_an_answer_that_is_preempted_or_shifts(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(right, ctx_size=256, draft_p_min=0) as llm:
        check_preempted_and_shifting(llm, TOKENS[:200], monkeypatch)
        assert used_blocks(drafts_of(llm)) == 0


def test_answers_that_fork(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(right, draft_p_min=0) as llm:
        plain = llm.generate(TOKENS[:100], n=2, speculate=False, **SAMPLED)
        draft_with(monkeypatch, "mtp")
        found = llm.generate(TOKENS[:100], n=2, **SAMPLED)
        assert [each.tokens for each in found] == [each.tokens for each in plain]


def test_a_long_prompt_is_caught_up_with_some_rows_at_a_time(
    right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its end alone, where it is longer than what may wait."""
    monkeypatch.setattr("edgellm.engine.mtp._ROWS", 64)
    rows, run = list[int](), MtpModel.run

    def noting(self: MtpModel, sequence: Any, tokens: Any, hidden: Any) -> Any:
        rows.append(len(tokens))
        return run(self, sequence, tokens, hidden)

    monkeypatch.setattr(MtpModel, "run", noting)
    draft_with(monkeypatch, "mtp")
    for most, expected in ((4096, [64, 64, 64, 11]), (100, [64, 37])):
        monkeypatch.setattr("edgellm.engine.mtp._MOST_WAITING", most)
        rows.clear()
        with load(right, draft_p_min=0) as llm:
            counts = llm.generate(TOKENS[:200], **GREEDY).stats.drafts["mtp"]
        assert rows[: len(expected)] == expected
        assert counts.accepted > 0.8 * counts.drafted > 10


def test_a_head_is_left_alone_where_it_does_not_pay(plain_case: tuple[str, Judge]) -> None:
    """As measured: random weights are never right."""
    with load(plain_case[0]) as llm:
        found = llm.generate(TOKENS[:50], **GREEDY)
        assert found.tokens == llm.generate(TOKENS[:50], speculate=False, **GREEDY).tokens


def test_it_can_be_turned_off(
    plain_case: tuple[str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_with(monkeypatch, "mtp")
    with (
        load(plain_case[0], ctx_size=256) as llm,
        load(plain_case[0], ctx_size=256, draft="none") as off,
    ):
        assert off.engine.draft_model is None
        assert off.generate(TOKENS[:50], **GREEDY).stats.drafts == {}
        assert llm.engine.memory.draft > 0 == off.engine.memory.draft
        assert llm.engine.memory.total == off.engine.memory.total + llm.engine.memory.draft


def test_what_is_shown(plain_case: tuple[str, Judge], tmp_path: Path) -> None:
    shown = CliRunner().invoke(edgellm, ["show", plain_case[0]]).output
    assert re.search(r"drafts +MTP head: \d", shown)
    make("qwen3_5_text", tmp_path, **SIZES)
    save_tokenizer(tmp_path)
    export(tmp_path, tmp_path / "bundle", name="tiny", source="x")
    shown = CliRunner().invoke(edgellm, ["show", str(tmp_path / "bundle")]).output
    assert re.search(r"drafts +no MTP head; .*--draft.* takes another model", shown)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_heads_with_tables_of_their_own_are_left_out(tmp_path: Path, form: str) -> None:
    """And without a norm of its own in a file it has the model's."""
    folder, scratch = tmp_path / "model", tmp_path / "head"
    judge = add_head(folder, scratch, family="qwen3_5_text", copies=False)
    tensors = head_tensors(judge, scratch)
    table = np.zeros((VOCABULARY, 64), np.float32)
    if form == "file":
        file = file_with_head(folder, tensors, family="qwen3_5_text", own_norm=False)
        head = open_checkpoint(file)
        assert head.mtp is not None
        norms = (head.mtp.tensor("final_norm"), head.tensor("final_norm"))
        np.testing.assert_array_equal(*(each.float32() for each in norms))
        tensors["nextn.embed_tokens"] = table
        path = file_with_head(folder, tensors, family="qwen3_5_text")
    else:
        path = folder_with_head(folder, {**tensors, "mtp.embed_tokens.weight": table})
    assert open_checkpoint(path).mtp is None


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder, scratch = tmp_path / "model", tmp_path / "head"
    tensors = head_tensors(add_head(folder, scratch, family="qwen3_5_text", copies=False), scratch)
    tensors[COMBINE] = tensors[COMBINE][:, :64]
    with pytest.raises(ModelFormatError, match=r"tensor combine has shape \[64, 64\]"):
        open_checkpoint(folder_with_head(folder, tensors))


def test_a_bundle_without_an_array_of_the_head_is_refused(
    plain_case: tuple[str, Judge], tmp_path: Path
) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(plain_case[0], path)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["mtp"]["arrays"]["layers.0.q_norm"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"mtp: array layers.0.q_norm is missing"):
        open_bundle(path)
