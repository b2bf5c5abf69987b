# ruff: noqa: RUF001
"""The formats in which models write tool calls: `FORMATS`, a table, and `format_of`, which finds a model's own."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from kvboost_hf.server.chats.values import JSON, Spelling

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Fields = Mapping[str, Mapping[str, Any]]


class Tags(NamedTuple):
    """How arguments are written as tags, one for each."""

    # A pattern of what comes before a value, with its `key`, and, where models tell, its type as `text`: "true" and
    # "string" for a text, all else for other values.
    open: str
    close: str  # the text behind a value, with its `{key}` if that is in it
    call_close: str  # the text behind the last value
    lines: bool  # whether a line end at each end of a value belongs to the tags
    written: str  # a tag with `{key}` and `{value}`, as the model writes it
    behind: str = ""  # the text behind a call, by which its end is known where a value lacks its closing tag
    quotes: tuple[str, str] = ("", "")  # texts that may stand around a value within its tags
    empty: str = ""  # the text that may stand in place of arguments, and of `call_close`
    nested: str = ""  # what tags in values begin with, where objects and lists are written as tags, too

    def end(self, key: str) -> str:
        """What ends a value, with its line end."""
        close = self.close.replace("{key}", key)
        return f"\n{close}" if self.lines else close


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The format in which a family of models writes tool calls."""

    name: str  # the models, for messages
    sign: str  # a pattern that the chat templates of such models have, and no others
    # The regions of an answer, as the `fields` of a response template of transformers. The text of the region
    # `tool_calls` is read as `head` and the next ones say; an object with name and arguments is one, too.
    fields: Fields
    # A pattern of what comes before the arguments, with the `name`, and an `id` if there is one. The arguments begin
    # behind it, or at its group `args`. None where calls are JSON objects alone.
    head: str | None = None
    spelling: Spelling = JSON  # how values are written, besides JSON
    python: bool = False  # whether arguments are those of a call of Python
    tags: Tags | None = None  # how arguments are written as tags; None for an object
    marker: str  # a text that nothing but calls begins with
    marked: bool = True  # whether no other text looks like a call
    starts: str = "<[{`"  # characters that a mark may begin with
    heads: tuple[str, ...] = ()  # what messages of an answer begin with: left out where it is cut there
    always: bool = False  # whether answers without calls have marks of the format, too
    nothing: str | None = None  # a tool that is not offered, and whose call does nothing
    before: str = ""  # text before the first call, as a model must write it
    # Text before the name, before the arguments and behind them; None where calls cannot be forced.
    call: tuple[str, str, str] | None = None
    between: str | None = None  # text between calls; None if there is one call at most
    after: str = ""  # text behind the last call

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]], own: Callable[[str], str]) -> str | None:
        """Calls as the model writes them, with `own` around what is no client's; None where that is not known."""
        if len(calls) > 1 and self.between is None:
            return None
        if self.call is not None:
            before, equals, behind = self.call
            texts = [own(before) + name + own(equals) + self._arguments(each) + own(behind) for name, each in calls]
        elif self.python and self.before:
            pairs = [(name, ", ".join(f"{key}={_python(one)}" for key, one in each.items())) for name, each in calls]
            texts = [f"{name}({found})" for name, found in pairs]
        else:
            return None
        return own(self.before) + own(self.between or "").join(texts) + own(self.after)

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.tags is None:
            return json.dumps(arguments, ensure_ascii=False)
        texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
        return "".join(self.tags.written.replace("{key}", key).replace("{value}", one) for key, one in texts.items())

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts that calls begin with, and no other text; empty where other texts look like calls."""
        opens = self.fields["tool_calls"].get("open", self.marker)
        return () if not self.marked else (opens,) if isinstance(opens, str) else tuple(opens)


def _python(value: Any) -> str:
    """A value of JSON as Python writes it, with texts as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _regions(open: str | list[str], close: str | list[str] | None = None, **more: Mapping[str, Any]) -> Fields:
    """Text, calls between two marks, and other regions. A mark that is a pattern begins with `re:`."""
    calls: dict[str, Any] = {"repeats": True, "content_args": {"strip": False}}
    for side, mark in (("open", open), ("close", close)):
        if isinstance(mark, str) and mark.startswith("re:"):
            calls[f"{side}_pattern"] = mark.removeprefix("re:")
        elif mark is not None:
            calls[side] = mark
    return {"content": {"content_args": {"strip": False}}, "tool_calls": calls, **more}


def _left_out(pattern: str) -> dict[str, Any]:
    """A mark that is no part of the text."""
    return {"open_pattern": pattern, "close_pattern": "", "repeats": True}


_NAME = r"(?P<name>[\w.:/-]{1,128})"
_PYTHON_NAME = r"(?P<name>[^\W\d][\w.-]{0,127})"
_BARE_NAME = r"(?P<name>[^<>{}\s=\"]{1,128})"


def _functions(name: str, sign: str, call: str, *, lines: bool, bare: bool = False) -> ToolFormat:
    """Calls as `<function=…>` with `<parameter=…>` in an element `call`, whose opening tag may lack if `bare`."""
    end = "\n" if lines else ""
    return ToolFormat(
        name=name,
        sign=sign,
        fields=_regions([f"<{call}>", *(["<function="] if bare else [])], f"</{call}>"),
        head=rf"(?:<function=){'?' if bare else ''}{_BARE_NAME}\s*>",
        tags=Tags(
            r"<parameter=(?P<key>[^<>\n]+)>",
            "</parameter>",
            "</function>",
            lines,
            f"<parameter={{key}}>{end}{{value}}{end}</parameter>\n",
            f"</{call}>" if bare else "",
        ),
        call=(f"<{call}>\n<function=", ">\n", f"</function>\n</{call}>"),
        between="\n",
        marker=f"<{call}>",
    )


def _invokes(name: str, sign: str, *blocks: str, mark: str = "", told: bool = False) -> ToolFormat:
    """Calls as elements `invoke` with elements `parameter`, whose names begin with `mark`, in one of the `blocks`.

    `told` says whether the model tells which values are texts, so that a grammar cannot have it.
    """
    begun = regex.escape(mark)
    return ToolFormat(
        name=name,
        sign=sign,
        fields=_regions([f"<{block}>" for block in blocks], [f"</{block}>" for block in blocks]),
        head=rf"<{begun}invoke name=\"?(?P<name>[^<>\"]{{1,128}}?)\"?\s*(?:(?P<args>/>)|>)",
        tags=Tags(
            rf"<{begun}parameter name=\"?(?P<key>[^<>\"]+)\"?(?:\s+string=\"(?P<text>true|false)\")?\s*>",
            f"</{mark}parameter>",
            f"</{mark}invoke>",
            False,
            f'<{mark}parameter name="{{key}}">{{value}}</{mark}parameter>\n',
            empty="/>",
        ),
        before=f"<{blocks[0]}>\n",
        call=None if told else (f'<{mark}invoke name="', '">\n', f"</{mark}invoke>\n"),
        between="",
        after=f"</{blocks[0]}>",
        marker=f"<{mark or blocks[0]}",
    )


def _pairs(name: str, sign: str, call: str, key: str, value: str, *, block: str = "", behind: str = "") -> ToolFormat:
    """Calls as elements `call`, in a `block` if there is one: the name, `behind` it a text, and pairs of elements."""
    opened, closed, line = f"<{call}>", f"</{call}>", "\n" if block else ""
    fields = _regions(opened, closed)
    if block:
        found = rf"re:(?:{regex.escape(f'<{block}>')}\s*)?{regex.escape(opened)}"
        fields = _regions(found, closed, marks=_left_out(regex.escape(f"</{block}>")))
    return ToolFormat(
        name=name,
        sign=sign,
        fields=fields,
        head=_NAME + (rf"\s*{regex.escape(behind)}" if behind else r"(?P<args>[\s<])"),
        tags=Tags(
            rf"<{key}>\s*(?P<key>[^<>]+?)\s*</{key}>\s*<{value}>",
            f"</{value}>",
            "",
            False,
            f"<{key}>{{key}}</{key}>\n<{value}>{{value}}</{value}>\n",
        ),
        before=f"<{block}>\n" if block else "",
        call=(opened, f"{behind}\n", f"{closed}{line}"),
        between="" if block else "\n",
        after=f"</{block}>" if block else "",
        marker="<tool_call" if block else opened,
    )


def _hunyuan(name: str, sign: str, mark: str) -> ToolFormat:
    names = (f"{each}{mark}" for each in ("tool_call", "arg_key", "arg_value"))
    return _pairs(name, sign, *names, block=f"tool_calls{mark}", behind=f"<tool_sep{mark}>")


HERMES = ToolFormat(
    name="Hermes, Qwen 2.5 and 3, Granite 4, SmolLM 3, ERNIE, EXAONE 4, Falcon-H1, Trinity",
    sign=r"<tool_call>(\\n|[^\w<]|\{%.{0,40}?%\})*(\\?[\"']?name|\\?[\"']arguments)",
    fields=_regions("<tool_call>", "</tool_call>"),
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
    marker="<tool_call>",
)
MIMO = _functions(
    "MiMo V2",
    r"<tool_call>(\\n|\s)*<function=[\w-]+>(\\n|\s)*<parameter=[\w-]+>[^\\\s]",
    "tool_call",
    lines=False,
)
QWEN_XML = _functions(
    "Qwen 3 Coder, Qwen 3.5, Nemotron 3, Step 3.5, Granite 4.2",
    r"<tool_call>(\\n|\s|['\"+ -]|\}\}|\{\{)*<function=|<function=(example_function_name|name)>",
    "tool_call",
    lines=True,
    bare=True,
)
SEED = _functions("Seed-OSS", r"<seed:tool_call>", "seed:tool_call", lines=False)
MINIMAX = _invokes("MiniMax M2", r"<minimax:tool_call>", "minimax:tool_call")
DOTS = _invokes("dots 3", r"<dots_function_call>", "dots_function_call")
DSML = _invokes(
    "DeepSeek V3.2 and V4", "｜DSML｜", "｜DSML｜function_calls", "｜DSML｜tool_calls", mark="｜DSML｜", told=True
)
DSML_SPACED = _invokes("DeepSeek V4.1", "｜DSML｜ calls", "｜DSML｜ calls", mark="｜DSML｜ ", told=True)
_MINIMAX = "]<]minimax[>["  # its first bracket may be taken for one too many behind a call
MINIMAX_NESTED = ToolFormat(
    name="MiniMax M3",
    sign=regex.escape(_MINIMAX),
    fields=_regions(f"{_MINIMAX}<tool_call>", f"{_MINIMAX}</tool_call>"),
    head=rf"\]?{regex.escape(_MINIMAX[1:])}<invoke name=\"(?P<name>[^<>\"]{{1,128}})\"\s*>",
    tags=Tags(
        rf"{regex.escape(_MINIMAX)}<(?P<key>[^<>/]+)>",
        f"{_MINIMAX}</{{key}}>",
        f"{_MINIMAX}</invoke>",
        False,
        f"{_MINIMAX}<{{key}}>{{value}}{_MINIMAX}</{{key}}>",
        nested=_MINIMAX,
    ),
    before=f"{_MINIMAX}<tool_call>\n",
    call=(f'{_MINIMAX}<invoke name="', '">', f"{_MINIMAX}</invoke>\n"),
    between="",
    after=f"{_MINIMAX}</tool_call>",
    marker=f"{_MINIMAX}<tool_call>",
    starts="]",
)
GCML = _invokes("GigaChat 3.5", "｜GCML｜", "｜GCML｜tool_calls", mark="｜GCML｜", told=True)
GLM = _pairs(
    "GLM 4.5 to 5, HyperCLOVA X Think 32B, Ling 3, Laguna, Spark 2.5",
    r"<arg_key>",
    "tool_call",
    "arg_key",
    "arg_value",
)
IQUEST = _pairs("IQuest", r"<iquest_tool_call>", "iquest_tool_call", "arg_key", "arg_value")
LONGCAT_TAGS = _pairs(
    "LongCat Flash Lite and Thinking",
    r"<longcat_arg_key>",
    "longcat_tool_call",
    "longcat_arg_key",
    "longcat_arg_value",
)
HUNYUAN = _hunyuan("Hunyuan 3", r"<tool_sep(\{\}|:opensource)>", ":opensource")
HUNYUAN_PREVIEW = _hunyuan("Hunyuan 3 Preview", r"<tool_sep>(?s:.*)<arg_key>|<arg_key>(?s:.*)<tool_sep>", "")
LONGCAT = ToolFormat(
    name="LongCat Flash Chat",
    sign=r"<longcat_tool_call>",
    fields=_regions("<longcat_tool_call>", "</longcat_tool_call>"),
    call=('<longcat_tool_call>\n{"name": "', '", "arguments": ', "}\n</longcat_tool_call>"),
    between="",
    marker="<longcat_tool_call>",
)
SOLAR = ToolFormat(
    name="Solar Open 2",
    sign=r"<\|tool_call:start\|>",
    fields=_regions("<|tool_call:start|>", "<|tool_call:end|>"),
    head=r"(?P<name>[\w.:/-]{1,128})(?P<args>[\s<])",
    tags=Tags(
        r"<\|tool_arg:start\|>\s*(?P<key>[^<>|]+?)\s*<\|tool_arg:value\|>",
        "<|tool_arg:end|>",
        "",
        False,
        "<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n",
    ),
    call=("<|tool_call:start|>", "\n", "<|tool_call:end|>"),
    between="\n",
    marker="<|tool_call:start|>",
)
SOLAR_CHANNELS = ToolFormat(
    name="Solar Open",
    sign=r"<\|tool_call:begin\|>",
    fields=_regions(
        r"re:(?:(?:<\|begin\|>assistant)?<\|tool_calls\|>\s*)?<\|tool_call:begin\|>",
        "<|tool_call:end|>",
        thinking={
            "open": ["<|think|>", "<|begin|>assistant<|think|>"],
            "close": ["<|end|>", "<|flush|>"],
            "repeats": True,
        },
        marks=_left_out(
            r"<\|begin\|>assistant<\|content\|>|<\|(?:content|end|flush|calls)\|>|"
            r"<\|begin\|>assistant(?=<\|think\|>)"
        ),
    ),
    head=r"\s*(?P<id>[\w-]{1,64})\s*<\|tool_call:name\|>(?P<name>[\w.:/-]{1,128})\s*<\|tool_call:args\|>",
    before="<|tool_calls|>",
    call=("<|tool_call:begin|>0<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    between=None,
    after="<|calls|>",
    marker="<|tool_call",
    heads=("<|begin|>", "<|content|>"),
    always=True,
)
MINICPM = ToolFormat(
    name="MiniCPM 5",
    sign=r"<function name=\\?\"(?s:.*)<param name=",
    fields=_regions(['<function name="'], "</function>"),
    head=r"(?P<name>[^<>\"]{1,128})\"\s*>",
    tags=Tags(
        r"<param name=\"(?P<key>[^<>\"]+)\"\s*>",
        "</param>",
        "",
        False,
        '<param name="{key}">{value}</param>',
        quotes=("<![CDATA[", "]]>"),
    ),
    call=('<function name="', '">', "</function>"),
    between="\n",
    marker='<function name="',
)
_MISTRAL_FIELDS = _regions("[TOOL_CALLS]", r"re:(?=\[TOOL_CALLS\])")
_MISTRAL_HEAD = _NAME + r"(?:\[CALL_ID\](?P<id>\w{0,64}))?(?:\[ARGS\])?\s*(?P<args>\{)"
MISTRAL_NAMED = ToolFormat(
    name="Mistral since its eleventh tokenizer",
    sign=r"\[TOOL_CALLS\](?s:.*)\[ARGS\]",
    fields=_MISTRAL_FIELDS,
    head=_MISTRAL_HEAD,
    call=("[TOOL_CALLS]", "[ARGS]", ""),
    between="",
    marker="[TOOL_CALLS]",
)
MISTRAL = ToolFormat(
    name="older Mistral",
    sign=r"\[TOOL_CALLS\]",
    fields=_MISTRAL_FIELDS,
    head=_MISTRAL_HEAD,
    before="[TOOL_CALLS][",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    after="]",
    marker="[TOOL_CALLS]",
)
DEEPSEEK = ToolFormat(
    name="DeepSeek V3, R1 and V3.1",
    sign="<｜tool▁call(s)?▁begin｜>",
    fields=_regions(
        "re:(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>",
        r"re:(?:\s*```\s*)?<｜tool▁call▁end｜>",
        marks=_left_out("<｜tool▁calls▁end｜>"),
    ),
    head=r"function<｜tool▁sep｜>(?P<name>[\w.:/-]{1,128})\s*```(?:json)?\s*(?P<args>\{)|"
    r"(?!function<)(?P<name>[\w.:/-]{1,128})<｜tool▁sep｜>\s*(?:```(?:json)?\s*)?(?P<args>\{)",
    before="<｜tool▁calls▁begin｜>",
    call=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    between="",
    after="<｜tool▁calls▁end｜>",
    marker="<｜tool▁call",
)
KIMI_XTML = ToolFormat(
    name="Kimi K3",
    sign=r"open_tag\('call'",
    fields=_regions(
        r"re:(?:<\|open\|>tools<\|sep\|>\s*)?<\|open\|>call(?=\s)",
        "<|close|>call<|sep|>",
        marks=_left_out(r"<\|(?:open|close)\|>response<\|sep\|>|<\|close\|>(?:tools|message)<\|sep\|>"),
    ),
    head=r"\s*tool=\"(?P<name>[^<>\"]{1,128})\"(?:\s+index=\"\d*\")?\s*<\|sep\|>",
    tags=Tags(
        r"<\|open\|>argument key=\"(?P<key>[^<>\"]+)\"(?:\s+type=\"(?P<text>\w+)\")?\s*<\|sep\|>",
        "<|close|>argument<|sep|>",
        "",
        False,
        '<|open|>argument key="{key}"<|sep|>{value}<|close|>argument<|sep|>',
    ),
    marker="<|open|>tools<|sep|>",
    heads=("<|open|>", "<|close|>"),
    always=True,
)
KIMI = ToolFormat(
    name="Kimi K2",
    sign=r"<\|tool_call_begin\|>|<\|im_system\|>tool_declare",
    fields=_regions(
        r"re:(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        marks=_left_out(r"<\|tool_calls_section_end\|>"),
    ),
    head=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w./-]{1,128})(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
    before="<|tool_calls_section_begin|>",
    call=("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    between=None,
    after="<|tool_calls_section_end|>",
    marker="<|tool_call",
)
_SAYS = r"\s*to=(?:all|user|assistant)(?=[\s<])"  # recipients that are none
_BUILT_IN = r"\s*to=(?!functions\.|(?:all|user|assistant)[\s<])[^\s<]+"
_MESSAGE = r"(?:\s*<\|constrain\|>\s*[^\s<]+|\s+(?!to=)[^\s<]+)?\s*<\|message\|>"  # behind the type of the content
HARMONY = ToolFormat(
    name="gpt-oss",
    sign=r"<\|channel\|>(?:analysis|commentary)",
    # A recipient stands in the section of the role, which the prompt may have begun, or in that of the channel.
    fields=_regions(
        r"re:(?:(?:<\|start\|>assistant)?<\|channel\|>\w+|<\|start\|>assistant|\A)\s*to=functions\.",
        ["<|call|>", "<|end|>", "<|return|>"],
        thinking={
            "open": ["<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"],
            "close": ["<|end|>", "<|return|>", "<|call|>"],
            "repeats": True,
        },
        reasoning={  # with more in its head, or to tools of OpenAI's own
            "open_pattern": rf"(?:<\|start\|>assistant|\A)(?:{_BUILT_IN}<\|channel\|>\w+|{_SAYS}<\|channel\|>analysis)"
            rf"{_MESSAGE}|(?:<\|start\|>assistant)?<\|channel\|>(?:\w+{_BUILT_IN}|analysis(?!<\|m)(?:{_SAYS})?)"
            rf"{_MESSAGE}",
            "close": ["<|end|>", "<|return|>", "<|call|>"],
            "repeats": True,
        },
        marks=_left_out(
            rf"(?:(?:<\|start\|>assistant|\A)(?:{_SAYS})?)?<\|channel\|>(?:final|commentary)(?:{_SAYS})?{_MESSAGE}"
            rf"|<\|start\|>assistant(?:{_SAYS})?{_MESSAGE}|<\|(?:message|end|return|call)\|>"
        ),
    ),
    head=r"(?P<name>[\w.:/-]{1,128})(?:\s[^\s<]*|<\|channel\|>\w+|<\|constrain\|>[^\s<]*)*<\|message\|>",
    call=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
    between=None,
    marker="<|channel|>commentary to=",
    heads=("<|start|>", "<|channel|>", "to="),
    always=True,
)
COHERE = ToolFormat(
    name="Command R7B and A",
    sign=r"<\|START_ACTION\|>",
    fields=_regions(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        marks=_left_out(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
    ),
    before="<|START_ACTION|>[\n    ",
    call=('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}"),
    between=None,
    after="\n]<|END_ACTION|>",
    marker="<|START_ACTION|>",
    always=True,
)
COMMAND_R = ToolFormat(
    name="Command R",
    sign=r"Action:(?s:.*)\\?[\"']tool_name|\\?[\"']tool_name(?s:.*)Action:",
    fields=_regions(r"re:Action:\s*```json", "```"),
    before="Action: ```json\n[\n    ",
    call=('{\n        "tool_name": "', '",\n        "parameters": ', "\n    }"),
    between=",\n    ",
    after="\n]```",
    marker="Action:",
    starts="A",
    nothing="directly_answer",
)
GEMMA = ToolFormat(
    name="FunctionGemma and Gemma 4",
    sign=r"<start_function_call>|<\|tool_call>\s*call:|<\|tool_call>",
    fields=_regions(["<start_function_call>", "<|tool_call>"], ["<end_function_call>", "<tool_call|>"]),
    head=r"call:(?P<name>[\w.:/-]{1,128})\s*(?P<args>\{)",
    spelling=Spelling(bare_keys=True, delimiters=("<escape>", '<|"|>')),
    marker="<start_function_call>",
)
LFM = ToolFormat(
    name="LFM2 and 2.5",
    sign=r"<\|tool_(call|list)_start\|>|\A(?!(?s:.*)<tool_call>)(?s:.*)List of tools: [\[\"']",  # 2.5 names no mark
    fields=_regions("<|tool_call_start|>", "<|tool_call_end|>"),
    head=_PYTHON_NAME + r"\s*(?P<args>\()",
    spelling=Spelling(bare_quotes=True),
    python=True,
    before="<|tool_call_start|>[",
    between=", ",
    after="]<|tool_call_end|>",
    marker="<|tool_call_start|>",
)
OLMO = ToolFormat(
    name="OLMo 3",
    sign=r"<function_calls>",
    fields=_regions("<function_calls>", "</function_calls>"),
    head=_PYTHON_NAME + r"\s*(?P<args>\()",
    python=True,
    marker="<function_calls>",
)
APERTUS = ToolFormat(
    name="Apertus",
    sign=r"<\|tools_prefix\|>",
    fields=_regions("<|tools_prefix|>", "<|tools_suffix|>"),
    head=r'\{\s*"(?P<name>[^"\\]{1,128})"\s*:\s*(?P<args>\{)',
    before="<|tools_prefix|>[",
    call=('{"', '": ', "}"),
    between=", ",
    after="]<|tools_suffix|>",
    marker="<|tools_prefix|>",
)
INTERN = ToolFormat(
    name="InternLM 2.5",
    sign=r"<\|action_start\|>",
    fields=_regions("re:<\\|action_start\\|>\\s*<\\|plugin\\|>", "<|action_end|>"),
    call=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>"),
    between=None,
    marker="<|action_start|>",
)
GIGACHAT = ToolFormat(
    name="GigaChat 3 and 3.1",
    sign=r"<\|function_call\|>|function call<\|role_sep\|>|<\|role_sep\|>(?s:.*)function call",
    fields=_regions(r"re:<\|function_call\|>|(?:<\|message_sep\|>\s*)?function call<\|role_sep\|>", "<|message_sep|>"),
    call=('<|function_call|>{"name": "', '", "arguments": ', "}"),
    between=None,
    marker="<|function_call|>",
    starts="<f",
)
TOOLCALL = ToolFormat(
    name="Nemotron Nano 2",
    sign=r"<TOOLCALL>",
    fields=_regions("<TOOLCALL>", "</TOOLCALL>"),
    before="<TOOLCALL>[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    after="]</TOOLCALL>",
    marker="<TOOLCALL>",
)
TOOL_CALLS = ToolFormat(
    name="Jamba, MiniMax M1, older Hunyuan",
    sign=r"<tool_calls>",
    fields=_regions("<tool_calls>", "</tool_calls>"),
    before="<tool_calls>[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    after="]</tool_calls>",
    marker="<tool_calls>",
)
GRANITE = ToolFormat(
    name="Granite 3, Phi 4 mini, FireFunction",
    sign=r"<\|tool_call\|>|<\|/tool\|>|functools\[",
    fields=_regions(["<|tool_call|>", "functools["], "<|/tool_call|>"),
    before="<|tool_call|>[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    after="]",
    marker="<|tool_call|>",
    starts="<f",
)
PYTHONIC = ToolFormat(
    name="Llama 3.2 and 4 with calls of Python, ToolACE",
    sign=r"\[func_name1\(|\[\w*func(tion)?_?name\w*\(",
    fields=_regions(r"re:\A\s*(?:<\|python_(?:start|tag)\|>\s*)?(?=\[\s*[^\W\d][\w.-]*\s*\()", "<|python_end|>"),
    head=_PYTHON_NAME + r"\s*(?P<args>\()",
    python=True,
    marker="<|python_start|>",
    marked=False,
)
# A call as an example, with a placeholder for the name: templates that list tools as JSON have `"parameters"`, too.
_EXAMPLE = r"\{{1,2}\s*\\?[\"']name\\?[\"']\s*:\s*(\\?[\"'][\w <>$-]+\\?[\"']|[\w <>$-]+)\s*,\s*\\?[\"']%s\\?[\"']\s*:"
LLAMA = ToolFormat(
    name="Llama 3",
    sign=r"<\|python_tag\|>|" + _EXAMPLE % "parameters",
    fields=_regions(
        r're:\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|function)")|<\|python_tag\|>(?=\w+\.call\()'
    ),
    head=r"(?P<name>\w{1,128})\.call(?P<args>\()",
    python=True,
    call=('{"name": "', '", "parameters": ', "}"),
    between=None,
    marker="<|python_tag|>{",
    marked=False,
)
XLAM = ToolFormat(
    name="xLAM, Hammer",
    sign=_EXAMPLE % "arguments",
    fields=_regions(r're:\A\s*(?:```(?:json)?\s*)?(?=\[?\s*\{\s*"(?:name|type|function)")', "```"),
    before="[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    after="]",
    marker='[{"name"',
    marked=False,
)
FORMATS = (  # the first whose sign a template has
    HARMONY,
    SEED,
    MINIMAX,
    MINIMAX_NESTED,
    DOTS,
    LONGCAT_TAGS,
    LONGCAT,
    HUNYUAN,
    HUNYUAN_PREVIEW,
    SOLAR,
    SOLAR_CHANNELS,
    IQUEST,
    GLM,
    MIMO,
    QWEN_XML,
    MINICPM,
    DSML_SPACED,
    DSML,
    GCML,
    DEEPSEEK,
    KIMI_XTML,
    KIMI,
    COHERE,
    LFM,
    GEMMA,
    OLMO,
    APERTUS,
    INTERN,
    GIGACHAT,
    TOOLCALL,
    HERMES,
    TOOL_CALLS,
    GRANITE,
    MISTRAL_NAMED,
    MISTRAL,
    COMMAND_R,
    PYTHONIC,
    LLAMA,
    XLAM,
)


def format_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> ToolFormat:
    """The format in which a model writes tool calls, by its chat template; `ValueError` if it shows none."""
    known = known_format(template_for(tokenizer, tools))
    if known is None:
        names = "; ".join(each.name for each in FORMATS)
        raise ValueError(
            "`tools` needs a model that writes calls in a format that is known here; the chat template of this one "
            f"shows none of {names}. Give its tokenizer a `response_template`."
        )
    return known


@lru_cache(maxsize=16)
def known_format(template: str) -> ToolFormat | None:
    """The format that a chat template shows; None for none that is known."""
    return next((known for known in FORMATS if regex.search(known.sign, template)), None)


class ToolSupport(NamedTuple):
    """Whether requests to a model may have tools."""

    told: str  # in whose format calls are found, or why requests with tools are refused: a line for people
    served: bool  # whether they may
    unknown: bool = False  # whether the chat template has a place for tools, but shows no format that is known

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "ToolSupport":
        """The support of the model with this tokenizer."""
        try:
            template = template_for(tokenizer, [])
        except ValueError:
            return cls("refused: the chat template has no place for them", False)
        if getattr(tokenizer, "response_template", None) is not None:
            return cls("calls are found by the tokenizer's response template", True)
        known = known_format(template)
        if known is None:
            told = "refused: the chat template shows no format of calls that is known; give the tokenizer a "
            return cls(f"{told}`response_template`", False, unknown=True)
        forced = "" if known.call is not None else "; tool_choice cannot force them"
        return cls(f"calls are found as these models write them: {known.name}{forced}", True)


def template_for(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> str:
    """The chat template for chats with tools; `ValueError` if there is none, or it has no place for tools."""
    template = tokenizer.get_chat_template(tools=[dict(tool) for tool in tools]) if tokenizer.chat_template else ""
    if "tools" not in template:
        raise ValueError(
            "`tools` needs a model whose chat template has a place for them, and that of this one has none. "
            "Leave `tools` out, or load a tokenizer with such a template."
        )
    return template
