"""Faults that were reported of other servers, each with the input that showed it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers

from dgpp_core.text.decode import IncrementalDecoder
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.reply import Delta, ReplyParser
from dgpp_core.text.stack import load_text, starts_in_reasoning
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.tokenizer_files import TokenizerConfig

THINK = ("<think>", "</think>")
SHARED = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"


def stream(
    backend: tokenizers.Tokenizer,
    pieces: Sequence[bytes | str],
    *,
    markers: tuple[str, str] | None = THINK,
    inside: bool = True,
    stops: tuple[str, ...] = (),
) -> tuple[str, str, ReplyParser]:
    """Reasoning and content of a reply that arrives in ``pieces``, one token each."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    tokenizer = Tokenizer(backend, raw, frozenset(), frozenset(), TokenizerConfig())
    parser = ReplyParser(tokenizer, reasoning=markers, in_reasoning=inside, stops=stops)
    deltas = [delta for token_id in range(len(raw)) for delta in parser.push(token_id)]
    deltas += parser.finish()
    texts = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    return texts["reasoning"], texts["content"], parser


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of the text's single bytes."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("cut", range(1, len("<reasoning>")))
def test_a_tag_cut_anywhere_does_not_leak_reasoning(backend: tokenizers.Tokenizer, cut: int) -> None:
    """youssofal/MTPLX PR 149: the hold-back window was shorter than the longest tag."""
    markers = ("<reasoning>", "</reasoning>")
    pieces = [markers[0][:cut], markers[0][cut:] + "SECRET" + markers[1][:cut], markers[1][cut:] + " V2"]
    reasoning, content, _ = stream(backend, pieces, markers=markers, inside=False)
    assert (reasoning, content) == ("SECRET", " V2")


@pytest.mark.parametrize("cut", range(1, len(THINK[1])))
def test_any_non_empty_prefix_of_a_marker_is_held_back(backend: tokenizers.Tokenizer, cut: int) -> None:
    """ai-dynamo/dynamo PR 10569: a lone ``<`` at the end of a piece was let go, so the marker never came together."""
    close = THINK[1]
    pieces = ["think" + close[:cut], close[cut:] + "\n<tool_call>f</tool_call>"]
    reasoning, content, _ = stream(backend, pieces)
    assert (reasoning, content) == ("think", "\n<tool_call>f</tool_call>")


def test_a_marker_after_an_incomplete_character_ends_reasoning_at_the_marker(tokenizer: Tokenizer) -> None:
    """tenstorrent/vllm PR 471: the boundary was decided from ids while text was still buffered."""
    close = tokenizer.id_of(THINK[1])
    assert close is not None
    half = spelled(tokenizer, "🙂")[:2]
    parser = ReplyParser(tokenizer, reasoning=THINK, in_reasoning=True)
    deltas = [
        delta for i in [*spelled(tokenizer, "ab"), *half, close, *spelled(tokenizer, "c")] for delta in parser.push(i)
    ]
    assert deltas == [
        Delta("reasoning", "a"), Delta("reasoning", "b"), Delta("reasoning", "\ufffd"), Delta("content", "c", (5,)),
    ]  # fmt: skip
    assert parser.reasoning_tokens == 5


def test_a_switch_that_the_template_ignores_is_found_at_load(folder: Path, tmp_path: Path) -> None:
    """LimeChain/glm-5.3-flash-2xdgx-spark-vllm: ``enable_thinking: false`` changed nothing, silently."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<think>", encoding="utf-8")
    assert load_text(tmp_path, None, config_eos=()).switches.thinking == ()
    assert load_text(folder, None, config_eos=()).switches.thinking == ("enable_thinking",)


def test_where_a_reply_starts_is_read_off_the_rendered_prompt(folder: Path) -> None:
    """ai-dynamo/dynamo#8636: with thinking off the prompt closes it, and the whole reply went to reasoning."""
    stack = load_text(folder, None, config_eos=())
    assert stack.template is not None
    prompt = stack.template.render([{"role": "user", "content": "x"}], kwargs={"enable_thinking": False})
    inside = starts_in_reasoning(prompt, stack.reasoning)
    parser = ReplyParser(stack.tokenizer, reasoning=stack.reasoning, in_reasoning=inside)
    deltas = [delta for i in stack.tokenizer.encode("<tool_call>f") for delta in parser.push(i)]
    assert {delta.kind for delta in deltas} == {"content"}
    assert "".join(delta.text for delta in deltas) == "<tool_call>f"


def test_a_reply_that_only_reasons_is_distinguishable(backend: tokenizers.Tokenizer) -> None:
    """Blackwellboy/model-serving-minefield entry 12: thinking ate the limit and the reply looked empty."""
    reasoning, content, parser = stream(backend, ["long ", "thought", "</thi"])
    assert (reasoning, content, parser.reasoning_tokens) == ("long thought</thi", "", 3)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no chat templates in {SHARED}")
def test_a_switch_that_keeps_earlier_reasoning_keeps_the_prefix() -> None:
    """A GLM cluster: each turn dropped earlier reasoning, so the prefix cache missed."""
    template = ChatTemplate((SHARED / "GLM-4.7.jinja").read_text(encoding="utf-8"), {})
    first = [{"role": "user", "content": "a"}]
    second = [*first, {"role": "assistant", "content": "c", "reasoning_content": "r"}, {"role": "user", "content": "b"}]
    assert "clear_thinking" in template.variables
    before, kept = template.render(first), template.render(second, kwargs={"clear_thinking": False})
    assert kept.startswith(before + "r</think>c")
    assert not template.render(second).startswith(before + "r</think>c")


@pytest.mark.parametrize("inside", [True, False])
def test_a_stop_string_in_two_pieces_shows_nothing_of_itself(backend: tokenizers.Tokenizer, inside: bool) -> None:
    """SharpAI/SwiftLM#126 and #133, on chat and on completions."""
    stop, pieces = "\nUser:", ["hi", "\nUser", ": x"]
    assert stream(backend, pieces, markers=None, stops=(stop,))[1] == "hi"
    _, content, parser = stream(backend, ["</think>"] * inside + pieces, inside=inside, stops=(stop,))
    assert content == "hi"
    assert parser.stopped


def test_an_emoji_of_two_tokens_is_one_emoji(backend: tokenizers.Tokenizer) -> None:
    """antonellof/ferrox#124."""
    raw = "🙂".encode()
    for cut in range(1, len(raw)):
        assert stream(backend, [raw[:cut], raw[cut:]], markers=None)[1] == "🙂"


def test_korean_is_byte_exact_in_every_split(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> None:
    """ai-dynamo/dynamo#12630: U+FFFD was sent and the finished syllable dropped."""
    raw = "안녕하세요, 오늘은 날씨가 좋네요!".encode()
    for cut in range(len(raw) + 1):
        assert stream(backend, [raw[:cut], raw[cut:]], markers=None)[1].encode() == raw
    decoder = IncrementalDecoder(tokenizer)
    shown = "".join(map(decoder.push, spelled(tokenizer, raw.decode()))) + decoder.finish()
    assert shown.encode() == raw


def test_a_stream_goes_on_after_a_replacement_character(backend: tokenizers.Tokenizer) -> None:
    """penta2himajin/qwisp PR 134: one dangling U+FFFD suppressed all that followed."""
    raw = "世".encode()
    tail = [f" word{n}" for n in range(100)]
    assert stream(backend, [raw[:1], raw[1:], *tail], markers=None)[1] == "世" + "".join(tail)
    assert stream(backend, [raw[:1], *tail], markers=None)[1] == "\ufffd" + "".join(tail)
    assert stream(backend, ["\ufffd", *tail], markers=None)[1] == "\ufffd" + "".join(tail)


def test_null_content_is_not_the_word_none() -> None:
    """jayleaton/glm53-tensorfold-spark patch 0620."""
    template = ChatTemplate("{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}", {})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        {"role": "user", "content": "y"},
    ]
    prompt = template.render(normalise_messages(messages, template))
    assert prompt == "user:x;assistant:;tool:r;user:y;"
