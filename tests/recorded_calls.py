# ruff: noqa: E501, RUF001
"""What models of each format write: parts of their chat templates, answers, and the calls in these.

`RECORDED` has, by the name of the format in `tool_formats`, a part of such a chat template and answers: each with the
text around calls, the reasoning where the format marks it, and the calls.
"""

from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in {
        "get_weather": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["celsius", "fahrenheit"]},
        },
        "write_file": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": ["integer", "null"]},
        },
        "search": {
            "query": {"type": "string"},
            "options": {"$ref": "#/$defs/options"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "get_time": {},
    }.items()
]
TOOLS[2]["function"]["parameters"]["$defs"] = {"options": {"type": "object", "properties": {"deep": {}}}}

CODE = 'def main():\n    print("a < b", \'é\')\n\n\tif x:\n        return {"k": [1]}\n'
PARIS: tuple[str, Any] = ("get_weather", {"city": "Paris", "days": 3})
TOKYO: tuple[str, Any] = ("get_weather", {"city": "東京", "days": 10})
FILE: tuple[str, Any] = ("write_file", {"path": "src/main.py", "content": CODE})
FOUND: tuple[str, Any] = (
    "search",
    {"query": "x", "options": {"deep": {"a": [1, None]}}, "tags": ["a", "b"], "exact": True, "limit": None},
)
TIME: tuple[str, Any] = ("get_time", {})


class Recorded(NamedTuple):
    """An answer and what is in it."""

    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""
    ids: tuple[str, ...] = ()


_CODE_JSON = '"def main():\\n    print(\\"a < b\\", \'\\u00e9\')\\n\\n\\tif x:\\n        return {\\"k\\": [1]}\\n"'
_FOUND_JSON = '{"query": "x", "options": {"deep": {"a": [1, null]}}, "tags": ["a", "b"], "exact": true, "limit": null}'
_FILE_JSON = '{"path": "src/main.py", "content": ' + _CODE_JSON + "}"
_QWEN_FOUND = """<tool_call>
<function=search>
<parameter=query>
x
</parameter>
<parameter=options>
{"deep": {"a": [1, null]}}
</parameter>
<parameter=tags>
["a", "b"]
</parameter>
<parameter=exact>
True
</parameter>
<parameter=limit>
null
</parameter>
</function>
</tool_call>"""
_GLM_FOUND = (
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n<arg_key>options</arg_key>\n"
    '<arg_value>{"deep": {"a": [1, null]}}</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n'
    "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>null</arg_value>\n"
    "</tool_call>"
)

_M3 = (
    'I look.@<tool_call>\n@<invoke name="get_weather">@<city>Paris@</city>@<days>3@</days>@</invoke>\n'
    '@<invoke name="get_time">@</invoke>\n'
)
_M3_FOUND = (
    '@<invoke name="search">@<query><item>@</query>@<options>@<deep>@<deep>@<item>1@</item>@<item>@<a>x@</a>@</item>@</deep>'
    "@</deep>@</options>@<tags>@</tags>@<exact>true@</exact>@</invoke>\n"
)
_M3_FILE = (
    f'@<tool_call>\n@<invoke name="write_file">@<path>src/main.py@</path>@<content>{CODE}@</content>@</invoke>\n'
    '@<invoke name="get_time">@<a>@<item>1@</item>\n@<item>@</item>@</a>@<b>@<item>1@</item>2@</b>@</invoke>\n@</tool_call>'
)

RECORDED: dict[str, tuple[str, list[Recorded]]] = {
    "HERMES": (
        "{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{- \"</tools>\\n\\nFor "
        "each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
        'tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
        '<|im_end|>\\n" }}{% endif %}',
        [
            Recorded(
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
                [PARIS],
            ),
            Recorded(
                'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
                '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\u6771\\u4eac", "days": 10}}'
                "\n</tool_call>",
                [PARIS, TOKYO],
                "Let me see.",
            ),
            Recorded(f'<tool_call>{{"name": "write_file", "arguments": {_FILE_JSON}}}</tool_call>', [FILE]),
            Recorded(f'<tool_call>{{"arguments": {_FOUND_JSON}, "name": "search"}}</tool_call>', [FOUND]),
            Recorded('<tool_call>\n{"name": "get_time"}\n</tool_call>', [TIME]),
            Recorded('<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>', [TIME]),
            Recorded('<tool_call>\n{"name": "get_time", "arguments": ""}\n</tool_call>', [TIME]),
            Recorded('<tool_call>\n{"name": "get_time", "arguments": "{}"}\n</tool_call>', [TIME]),
            Recorded('<tool_call>\n{"name": "get_time", "parameters": {}}\n</tool_call>', [TIME]),
            Recorded(
                '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n'
                "</tool_call>",
                [PARIS],
            ),
            Recorded(
                '<tool_call>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}\n</tool_call>',
                [PARIS],
            ),
            Recorded(
                '<tool_call>\n{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", '
                '"days": 3}}}\n</tool_call>',
                [PARIS],
            ),
            # Arguments beside the name.
            Recorded(
                '<tool_call>\n{"name": "get_weather", "why": "So.", "city": "Paris", "days": 3}\n</tool_call>', [PARIS]
            ),
            Recorded('<tool_call>\n{"id": 1, "name": "get_time", "why": "So."}\n</tool_call>', [TIME]),
            # A bracket too few, and one too many.
            Recorded(
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}\n</tool_call>', [PARIS]
            ),
            Recorded(
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}\n</tool_call>',
                [PARIS],
            ),
            Recorded('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [PARIS]),
            Recorded(
                "<tool_call>\n{'name': 'get_weather', 'arguments': {'city': 'Paris', 'days': 3}}\n</tool_call>",
                [PARIS],
            ),
            Recorded(
                '<tool_call><tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
                "</tool_call>",
                [PARIS],
                "<tool_call>",
            ),
            Recorded(
                '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "<tool_call></tool_call>"}}\n'
                "</tool_call> Done.",
                [("write_file", {"path": "a", "content": "<tool_call></tool_call>"})],
                "Done.",
            ),
        ],
    ),
    "QWEN_XML": (
        '{% if tools %}{{ tools }}{{- "\\n\\nIf you choose to call a function ONLY reply in the following format with NO '
        "suffix:\\n\\n<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n"
        "</parameter>\\n</function>\\n</tool_call>\" }}{% endif %}{{- '\\n<tool_call>\\n<function=' + tool_call.name }}",
        [
            Recorded(
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
                "</parameter>\n</function>\n</tool_call>",
                [PARIS],
            ),
            Recorded(
                "I write it.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\nsrc/main.py\n</parameter>\n"
                f"<parameter=content>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
                [FILE],
                "I write it.",
            ),
            Recorded(_QWEN_FOUND, [FOUND]),
            Recorded("<tool_call>\n<function=get_time>\n</function>\n</tool_call>", [TIME]),
            Recorded(
                "<function=get_weather>\n<parameter=city>\n東京\n</parameter>\n<parameter=days>\n10\n</parameter>\n"
                "</function>\n</tool_call>",  # without the first tag
                [TOKYO],
            ),
            Recorded(
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
                "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
                [PARIS, TIME],
            ),
            Recorded(
                '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
                [PARIS],
            ),
            Recorded(
                "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n"
                "</param> </function\n\n</parameter>\n<parameter=mode>\nNone\n</parameter>\n</function>\n</tool_call>",
                [("write_file", {"path": "a", "content": "</param> </function\n", "mode": None})],
            ),
            # Without the tags behind values.
            Recorded(
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n"
                "</tool_call>",
                [PARIS],
            ),
            Recorded(
                "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n<parameter=city>\nParis\n</function></tool_call>",
                [PARIS],
            ),
            Recorded(
                "<tool_call>\n<function=write_file>\n<parameter=path>\na\n<parameter=content>\n<a>\n</function>\n"
                "<parameter=other>\n<parameter=path>\nb\n</function>\n</tool_call>",
                [("write_file", {"path": "a", "content": "<a>\n</function>\n<parameter=other>\n<parameter=path>\nb"})],
            ),
            # Functionary 3.1.
            Recorded(
                'I look.<function=get_weather>{"city": "Paris", "days": 3}</function><function=get_time>{}</function>',
                [PARIS, TIME],
                "I look.",
            ),
        ],
    ),
    "MIMO": (
        "{% if tools %}{{ tools }}Output the function name and arguments so:\n<tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>value_1</parameter>\n</function>\n</tool_call>{% endif %}",
        [
            Recorded(
                "I write it.\n<tool_call>\n<function=write_file>\n<parameter=path>\n a\n</parameter>\n<parameter=content>"
                f"{CODE}</parameter>\n</function>\n</tool_call><tool_call>\n<function=get_time>\n</function>\n</tool_call>",
                [("write_file", {"path": "\n a\n", "content": CODE}), TIME],
                "I write it.",
            ),
        ],
    ),
    "MINIMAX_NESTED": (
        "{%- set ns_token = ']<]minimax[>[' -%}{%- set toolcall_begin_token = ns_token ~ '<tool_call>' -%}{{ tools }}",
        [
            Recorded(
                _M3.replace("@", "]<]minimax[>[")
                + _M3_FOUND.replace("@", "]<]minimax[>[")
                + "]<]minimax[>[</tool_call>",
                [
                    PARIS,
                    TIME,
                    (
                        "search",
                        {
                            "query": "<item>",
                            "options": {"deep": {"deep": ["1", {"a": "x"}]}},
                            "tags": [],
                            "exact": True,
                        },
                    ),
                ],
                "I look.",
            ),
            Recorded(
                _M3_FILE.replace("@", "]<]minimax[>["),
                [FILE, ("get_time", {"a": ["1", ""], "b": "]<]minimax[>[<item>1]<]minimax[>[</item>2"})],
            ),
        ],
    ),
    "SEED": (
        "{% if tools %}{{ tools }}<seed:tool_call>\n<function=example_function_name>{% endif %}",
        [
            Recorded(
                "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3"
                "</parameter>\n</function>\n</seed:tool_call>",
                [PARIS],
            ),
        ],
    ),
    "MINIMAX": (
        "{%- set toolcall_begin_token   = '<minimax:tool_call>' -%}{% if tools %}{{ tools }}<invoke name=\"tool-name-1\">"
        '\n<parameter name="param-key-1">param-value-1</parameter>\n</invoke>{% endif %}',
        [
            Recorded(
                '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
                '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="write_file">\n<parameter name="path">'
                f'src/main.py</parameter>\n<parameter name="content">{CODE}</parameter>\n</invoke>\n</minimax:tool_call>',
                [PARIS, FILE],
            ),
        ],
    ),
    "GLM": (
        "{% if tools %}{{ tools }}output the function name and arguments within the following XML format:\n<tool_call>"
        "{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>{% endif %}",
        [
            Recorded(
                "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
                "<arg_value>3</arg_value>\n</tool_call>",
                [PARIS],
            ),
            Recorded(
                "\nI look.\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>東京</arg_value><arg_key>days</arg_key>"
                "<arg_value>10</arg_value></tool_call>",
                [TOKYO],
                "\nI look.",
            ),
            Recorded(
                "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>src/main.py</arg_value>\n<arg_key>content"
                f"</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>",
                [FILE],
            ),
            Recorded(_GLM_FOUND, [FOUND]),
            Recorded("<tool_call>get_time\n</tool_call>", [TIME]),
            Recorded("<tool_call>get_time</tool_call>", [TIME]),
        ],
    ),
    "MISTRAL": (
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' }}",
        [
            Recorded('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]', [PARIS]),
            Recorded(
                '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": '
                '"get_time", "arguments": {}, "id": "VvvODy9mT"}]',
                [PARIS, TIME],
            ),
        ],
    ),
    "MISTRAL_NAMED": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + args }}",
        [
            Recorded('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}', [PARIS]),
            Recorded(
                'I look.[TOOL_CALLS]get_weather[CALL_ID]Hq3cVbN1x[ARGS]{"city": "Paris", "days": 3}'
                f"[TOOL_CALLS]write_file[ARGS]{_FILE_JSON}",
                [PARIS, FILE],
                "I look.",
                ids=("Hq3cVbN1x",),
            ),
            Recorded('[TOOL_CALLS]get_weather{"city": "東京", "days": 10}', [TOKYO]),
            Recorded("[TOOL_CALLS]get_time[ARGS]{}", [TIME]),
        ],
    ),
    "DEEPSEEK": (
        "{{ tools }}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'}}",
        [
            Recorded(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
                [PARIS],
            ),
            Recorded(
                "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n'
                "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                [PARIS, TIME],
                "Both.",
            ),
            Recorded(
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "東京", "days": 10}'
                f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{_FILE_JSON}<｜tool▁call▁end｜>"
                "<｜tool▁calls▁end｜>",
                [TOKYO, FILE],
            ),
        ],
    ),
    "KIMI": (
        "{% if tools -%}{{ '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson -}}{%- endif -%}",
        [
            Recorded(
                "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
                '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
                "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                [PARIS, TIME],
                "I look.",
                ids=("functions.get_weather:0", "functions.get_time:1"),
            ),
            Recorded(
                "<|tool_calls_section_begin|>\n<|tool_call_begin|> functions.write_file:12 <|tool_call_argument_begin|> "
                f"{_FILE_JSON} <|tool_call_end|>\n<|tool_calls_section_end|>",
                [FILE],
                ids=("functions.write_file:12",),
            ),
            Recorded(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time<|tool_call_argument_begin|>{}"
                "<|tool_call_end|><|tool_call_begin|>functions.get_time<|tool_call_argument_begin|>{}<|tool_call_end|>"
                "<|tool_calls_section_end|>",
                [TIME, TIME],
                ids=("functions.get_time",),  # which one call can have
            ),
        ],
    ),
    "KIMI_XTML": (
        "{{ tools }}{{ open_tag('think') }}{{- open_tag('call', [('tool', fn.name), ('index', loop.index)]) -}}",
        [
            Recorded(
                '<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" '
                'index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|open|>argument '
                'key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="get_time" '
                'index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|><|open|>argument key="path" type="string"'
                '<|sep|>src/main.py<|close|>argument<|sep|><|open|>argument key="content" type="string"<|sep|>'
                f"{CODE}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
                [FILE],
            ),
            Recorded(
                '<|open|>tools<|sep|><|open|>call tool="get_time" index="1"<|sep|><|open|>argument key="a" type="array"<|sep|>[1]'
                '<|close|>argument<|sep|><|open|>argument key="b" type="string"<|sep|>[1]<|close|>argument<|sep|>'
                "<|close|>call<|sep|><|close|>tools<|sep|>",
                [("get_time", {"a": [1], "b": "[1]"})],
            ),
            Recorded(
                "<|open|>response<|sep|>It is <b>.<|close|>response<|sep|><|close|>message<|sep|>", [], "It is <b>."
            ),
        ],
    ),
    "HARMONY": (
        "{% if tools %}{{ tools }}{% endif %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}"
        "{{- '<|start|>assistant to=' }}{{- 'functions.' + tool_call.name + '<|channel|>commentary ' }}",
        [
            Recorded(
                "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary "
                'to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris","days":3}<|call|>',
                [PARIS],
                reasoning="Need weather.",
            ),
            Recorded(
                "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>I write it."
                "<|end|><|start|>assistant<|channel|>commentary to=functions.write_file<|constrain|>json<|message|>"
                + _FILE_JSON,
                [FILE],
                "I write it.",
                "So.",
            ),
            Recorded(
                "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.get_time<|channel|>commentary "
                "json<|message|>{}<|call|>",
                [TIME],
                reasoning="So.",
            ),
            Recorded(
                "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It is <b>.<|return|>",
                [],
                "It is <b>.",
                "So.",
            ),
            Recorded("<|channel|>commentary to=functions.get_time <|constrain|>json<|message|><|call|>", [TIME]),
            Recorded("<|channel|>commentary to=functions.get_time code<|message|>{}<|call|>", [TIME]),
            Recorded("<|channel|>commentary to=functions.get_time <|constrain|>text <|message|>{}<|call|>", [TIME]),
            Recorded("<|channel|>final<|message|>Yes.", [], "Yes."),
            Recorded(" to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>", [TIME]),
            Recorded(
                "<|channel|>analysis code<|message|>So.<|end|><|start|>assistant to=functions.get_time<|channel|>"
                "commentary <|constrain|>application/json<|message|>{}<|call|>",
                [TIME],
                reasoning="So.",
            ),
            Recorded(
                "<|channel|>analysis to=python code<|message|>1 + 1<|call|><|start|>assistant to=browser.open<|channel|>"
                "commentary<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>analysis to=all<|message|>"
                " So.<|end|><|start|>assistant<|channel|>commentary<|constrain|>json<|message|>Yes.<|end|><|start|>"
                "assistant to=user<|channel|>final <|constrain|>text<|message|> It is to=us.<|return|>",
                [],
                "Yes. It is to=us.",
                "1 + 1{} So.",
            ),
            Recorded("<|message|>Yes <b>.<|end|><|start|>assistant<|message|> No.<|end|>", [], "Yes <b>. No."),
        ],
    ),
    "LONGCAT": (
        "{{ tools }}{{ '<longcat_tool_call>\n' + call + '\n</longcat_tool_call>' }}",
        [
            Recorded(
                'I look.<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
                '</longcat_tool_call><longcat_tool_call>\n{"name": "get_time", "arguments": {}}\n</longcat_tool_call>',
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                f'<longcat_tool_call>\n{{"name": "write_file", "arguments": {_FILE_JSON}}}\n</longcat_tool_call>',
                [FILE],
            ),
        ],
    ),
    "LONGCAT_TAGS": (
        "{{ tools }}<longcat_tool_call>{function-name}\n<longcat_arg_key>{arg-key-1}</longcat_arg_key>",
        [
            Recorded(
                "I look.\n<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>"
                "Paris</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3"
                "</longcat_arg_value>\n</longcat_tool_call>\n<longcat_tool_call>get_time\n</longcat_tool_call>",
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
                "</longcat_tool_call>",
                [PARIS],
            ),
        ],
    ),
    "HUNYUAN": (
        "{% set mark = ':opensource' %}{{ tools }}{{ '<tool_sep{}>'.format(mark) + '<arg_key{}>'.format(mark) }}",
        [
            Recorded(
                "I look.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
                "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
                "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
                "</tool_call:opensource>\n<tool_call:opensource>get_time<tool_sep:opensource>\n</tool_call:opensource>\n"
                "</tool_calls:opensource>",
                [PARIS, TIME],
                "I look.",
            ),
        ],
    ),
    "HUNYUAN_PREVIEW": (
        "{% set toolsep_token = '<tool_sep>' %}{% set argkey_begin_token = '<arg_key>' %}{{ tools }}",
        [
            Recorded(
                "I look.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
                "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<tool_sep>\n</tool_call>\n"
                "</tool_calls>",
                [PARIS, TIME],
                "I look.",
            ),
        ],
    ),
    "IQUEST": (
        "{{ tools }}<iquest_tool_call>name<arg_key>",
        [
            Recorded(
                "<iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>"
                "3</arg_value></iquest_tool_call><iquest_tool_call>get_time</iquest_tool_call>",
                [PARIS, TIME],
            ),
        ],
    ),
    "GIGACHAT": (
        '{{ tools }}{% set add_tokens = namespace(role_sep="<|role_sep|>\n", function_call="<|function_call|>") %}',
        [
            Recorded('<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [PARIS]),
            Recorded(
                f'I write it.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "write_file", "arguments": {_FILE_JSON}}}'
                "<|message_sep|>",
                [FILE],
                "I write it.",
            ),
        ],
    ),
    "SOLAR": (
        "{{ tools }}{{ '<|tool_call:start|>' + name + '\n' }}",
        [
            Recorded(
                "I look.\n<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
                "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>"
                "get_time\n<|tool_call:end|>",
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                "<|tool_call:start|>write_file\n<|tool_arg:start|>path<|tool_arg:value|>src/main.py<|tool_arg:end|>\n"
                f"<|tool_arg:start|>content<|tool_arg:value|>{CODE}<|tool_arg:end|>\n<|tool_call:end|>",
                [FILE],
            ),
        ],
    ),
    "SOLAR_CHANNELS": (
        "{{ tools }}{{ '<|begin|>assistant<|tool_calls|>' + '<|tool_call:begin|>' + id }}<|think|>",
        [
            Recorded(
                "<|think|>I need both.<|end|><|begin|>assistant<|content|>I look.<|end|><|begin|>assistant<|tool_calls|>"
                '<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris", "days": 3}'
                "<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>get_time<|tool_call:args|>{}"
                "<|tool_call:end|><|calls|>",
                [PARIS, TIME],
                "I look.",
                "I need both.",
                ids=("a1b2c3d4e5", "f6g7h8i9j0"),
            ),
            Recorded("<|think|>Hm.<|end|><|begin|>assistant<|content|>It is 7.<|flush|>", [], "It is 7.", "Hm."),
            Recorded("<|content|>It is 7.", [], "It is 7."),
            Recorded(
                f"<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>write_file<|tool_call:args|>{_FILE_JSON}"
                "<|tool_call:end|>",
                [FILE],
                ids=("0",),
            ),
        ],
    ),
    "MINICPM": (
        '{% if tools %}{{ tools }}<function name="function-name"><param name="param-name">value</param></function>{% endif %}',
        [
            Recorded(
                'I look.\n<function name="get_weather"><param name="city">Paris</param><param name="days">3</param>'
                '</function>\n<function name="get_time"></function>',
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                '<function name="write_file"><param name="path">src/main.py</param><param name="content"><![CDATA['
                + CODE
                + "]]></param></function>",
                [FILE],
            ),
            Recorded(
                '<function name="search">\n<param name="query"><![CDATA[</param>]]></param>\n<param name="tags">'
                '<![CDATA[["a"]]]></param>\n<param name="exact">true</param>\n</function>',
                [("search", {"query": "</param>", "tags": ["a"], "exact": True})],
            ),
        ],
    ),
    "DSML": (
        "{% set mark = '｜DSML｜' %}{{ tools }}Write a <{{ mark }}function_calls> block.",
        [
            Recorded(
                'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
                'string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
                '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n'
                "</｜DSML｜function_calls>",
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write_file">\n<｜DSML｜parameter name="path" string="true">'
                'src/main.py</｜DSML｜parameter>\n<｜DSML｜parameter name="content" string="true">'
                f"{CODE}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                [FILE],
            ),
            Recorded(
                '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n<｜DSML｜parameter name="a" string="false">[1]'
                '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
                "</｜DSML｜tool_calls>",
                [("get_time", {"a": [1], "b": "[1]"})],
            ),
            # Objects in place of tags, and no arguments.
            Recorded(
                '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n{"city": "Paris", "days": 3}\n'
                '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time"/>\n<｜DSML｜invoke name="get_time">{}'
                "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                [PARIS, TIME, TIME],
            ),
        ],
    ),
    "DSML_SPACED": (
        "{{ tools }}{{ '<｜DSML｜ calls>' }}",
        [
            Recorded(
                'I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">'
                'Paris</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
                '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="get_time">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(
                '<｜DSML｜ calls><｜DSML｜ invoke name="get_weather">{"city": "東京", "days": 10}</｜DSML｜ invoke></｜DSML｜ calls>',
                [TOKYO],
            ),
        ],
    ),
    "GCML": (
        "{{ tools }}Write <｜GCML｜tool_calls>.",
        [
            Recorded(
                '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="write_file">\n<｜GCML｜parameter name="path" string="true">'
                'src/main.py</｜GCML｜parameter>\n<｜GCML｜parameter name="content" string="true">'
                f"{CODE}</｜GCML｜parameter>\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
                [FILE],
            ),
        ],
    ),
    "DOTS": (
        "{{ tools }}<dots_function_call>",
        [
            Recorded(
                '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter '
                'name="days">3</parameter>\n</invoke>\n</dots_function_call>\n<dots_function_call>\n<invoke name="get_time">'
                "\n</invoke>\n</dots_function_call>",
                [PARIS, TIME],
            ),
            Recorded(
                '<dots_function_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}</dots_function_call>',
                [PARIS],
            ),
        ],
    ),
    "APERTUS": (
        "{% set calls_token = '<|tools_prefix|>' %}{{ tools }}{{ calls_token + '[' }}",
        [
            Recorded(
                'I look.<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"get_time": {}}]<|tools_suffix|>',
                [PARIS, TIME],
                "I look.",
            ),
            Recorded(f'<|tools_prefix|>[{{"write_file": {_FILE_JSON}}}]', [FILE]),  # the last mark ends the answer
            Recorded(f'<|tools_prefix|>[{{"search": {_FOUND_JSON}}}]<|tools_suffix|>', [FOUND]),
        ],
    ),
    "COHERE": (
        '{% if tools %}{{ tools }}{% endif %}<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": }]<|END_ACTION|>',
        [
            Recorded(
                '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", '
                '"days": 3}},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
                [PARIS, TIME],
            ),
            Recorded("<|START_RESPONSE|>It is 7.<|END_RESPONSE|>", [], "It is 7."),
        ],
    ),
    "COMMAND_R": (
        "{% if tools %}{{ tools }} Write 'Action:' followed by a json-formatted list of actions: ```json\n[\n    {\n"
        '        "tool_name": title of the tool in the specification,\n        "parameters": a list\n    }\n]```{% endif %}',
        [
            Recorded(
                'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {\n            '
                '"city": "Paris",\n            "days": 3\n        }\n    }\n]\n```',
                [PARIS],
            ),
            Recorded(
                'Action:```json\n[\n    {\n        "tool_name": "directly_answer",\n        "parameters": {}\n    }\n]\n```',
                [],
            ),
            Recorded(
                'Plan: both.\nAction: ```json\n[{"tool_name": "get_time", "parameters": {}}, {"tool_name": '
                '"get_weather", "parameters": {"city": "東京", "days": 10}}]```',
                [TIME, TOKYO],
                "Plan: both.",
            ),
        ],
    ),
    "GEMMA": (
        "{% if tools %}{{ tools }}{% endif %}{{- '<start_function_call>call:' + name -}}",
        [
            Recorded(
                "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>", [PARIS]
            ),
            Recorded(
                f"<start_function_call>call:write_file{{path:<escape>src/main.py<escape>,content:<escape>{CODE}<escape>}}"
                "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
                [FILE, TIME],
            ),
            Recorded(
                'I look.<|tool_call>call:search{query:<|"|>x<|"|>,options:{deep:{a:[1,null]}},tags:[<|"|>a<|"|>,'
                '<|"|>b<|"|>],exact:true,limit:null}<tool_call|>',
                [FOUND],
                "I look.",
            ),
            Recorded(
                '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:get_time{}'
                "<tool_call|>",
                [PARIS, TIME],
            ),
            Recorded(
                '<|tool_call>call:get_time{<|"|>a b<|"|>:<|"|>{"k": 1}<|"|>,$top:-1.5,@id:{x/y:[{},[]]},no:false}'
                "<tool_call|>",
                [("get_time", {"a b": '{"k": 1}', "$top": -1.5, "@id": {"x/y": [{}, []]}, "no": False})],
            ),
        ],
    ),
    "LFM": (
        '{%- if tools -%}{%- set s = "List of tools: <|tool_list_start|>[" -%}{{ tools }}{% endif %}',
        [
            Recorded(
                '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>I look.', [PARIS], "I look."
            ),
            Recorded(
                '<|tool_call_start|>[search(query=\'x\', options={"deep": {"a": [1, None]}}, tags=[\'a\', "b"], '
                "exact=True, limit=None), get_time()]<|tool_call_end|>",
                [FOUND, TIME],
            ),
            Recorded(
                '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]<|tool_call_end|>',
                [PARIS],
            ),
            # Quotes that are not escaped.
            Recorded(
                "<|tool_call_start|>[get_weather(city='L'Aquila', days=3), write_file(path='it's, \"so\"', content='print('a', 'b')\n"
                "print('it's')\n'), search(query='', options={'deep': {'it's': ['a's', 'b']}}, tags=['x'])]<|tool_call_end|>",
                [
                    ("get_weather", {"city": "L'Aquila", "days": 3}),
                    ("write_file", {"path": 'it\'s, "so"', "content": "print('a', 'b')\nprint('it's')\n"}),
                    ("search", {"query": "", "options": {"deep": {"it's": ["a's", "b"]}}, "tags": ["x"]}),
                ],
            ),
        ],
    ),
    "OLMO": (
        "{% if tools %}<functions>{{ tools }}</functions>{% endif %}{{ '<function_calls>' + calls + '</function_calls>' }}",
        [
            Recorded(
                '<function_calls>get_weather(city="Paris", days=3)\nget_time()\n</function_calls>', [PARIS, TIME]
            ),
        ],
    ),
    "INTERN": (
        "{% if tools %}{{ tools }}{% endif %}{{ '<|action_start|><|plugin|>' }}",
        [
            Recorded(
                'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
                "<|action_end|>\n",
                [PARIS],
                "I look.",
            ),
        ],
    ),
    "TOOLCALL": (
        '{% if tools %}<AVAILABLE_TOOLS>{{ tools }}{{- \'<TOOLCALL>[{{"name": "tool_name1", "arguments": \' }}{% endif %}',
        [
            Recorded(
                '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "get_time", '
                '"arguments": {}}]</TOOLCALL>',
                [PARIS, TIME],
            ),
        ],
    ),
    "TOOL_CALLS": (
        "{% if tools %}<available_tools>{{ tools }}</available_tools>{% endif %}{{- '<tool_calls>[' -}}",
        [
            Recorded(
                '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n]</tool_calls>',
                [PARIS],
            ),
            Recorded(
                '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n{"name": "get_time", '
                '"arguments": {}}\n</tool_calls>',
                [PARIS, TIME],
            ),
        ],
    ),
    "GRANITE": (
        "{% if tools %}{{ tools }} respond with <|tool_call|> followed by a JSON list of tools used.{% endif %}",
        [
            Recorded('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]', [PARIS]),
            Recorded(
                '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}<|/tool_call|>',
                [PARIS],
            ),
            Recorded('functools[{"name": "get_time", "arguments": {}}]', [TIME]),
        ],
    ),
    "PYTHONIC": (
        "{% if tools %}{{ tools }} You MUST put it in the format of [func_name1(params_name1=params_value1), "
        "func_name2(params)]{% endif %}",
        [
            Recorded('[get_weather(city="Paris", days=3)]', [PARIS]),
            Recorded(
                "<|python_start|>[get_weather(city='Paris', days=3), get_weather(city=\"東京\", days=10)]<|python_end|>",
                [PARIS, TOKYO],
            ),
            Recorded("[get_time()]", [TIME]),
        ],
    ),
    "LLAMA": (
        '{% if tools %}{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name '
        "and its value}. Do not use variables.' }}{{ tools }}{% endif %}",
        [
            Recorded('{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', [PARIS]),
            Recorded('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', [PARIS]),
            Recorded(
                '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', [PARIS]
            ),
            Recorded('{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [PARIS]),
            Recorded(
                '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "get_time", "parameters": '
                "{}}",
                [PARIS, TIME],
            ),
            Recorded('{"name": "get_time"}', [TIME]),
            Recorded('<|python_tag|>get_weather.call(city="Paris", days=3)', [PARIS]),
        ],
    ),
    "XLAM": (
        "{% if tools %}{{ tools }}The output MUST strictly adhere to the following JSON format: "
        '[{"name": "func_name1", "arguments": {"argument1": "value1"}}]{% endif %}',
        [
            Recorded('[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]', [PARIS]),
            Recorded(
                '```json\n[{"name": "get_time", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "東京", '
                '"days": 10}}]\n```',
                [TIME, TOKYO],
            ),
        ],
    ),
}
