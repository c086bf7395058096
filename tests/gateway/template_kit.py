# pyright: basic
"""Small chat templates in the formats that the families document, and model directories made of them."""

import json
import re

QWEN3 = """
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if has_system else '') -}}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with '
 ~ 'function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within '
 ~ '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n'
 ~ '</tool_call><|im_end|>\\n' -}}
{%- elif has_system -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.asked and (loop.last or m.reasoning_content) -%}
{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') -}}
{%- else -%}
{{- m.content -}}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\\n' if m.content or not loop.first -}}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' -}}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""

QWEN3_THINKING = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}",
    "{{- '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt -}}",
)

LLAMA_3 = """{{- bos_token -}}
{%- set date = date_string | default('26 Jul 2024') -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') -}}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' -}}
{%- if tools -%}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond with a '
 ~ 'JSON for a function call with its proper arguments that best answers the given prompt.\\n\\n'
 ~ 'Respond in the format {"name": function name, "parameters": '
 ~ 'dictionary of argument name and its value}.Do not use variables.\\n\\n' -}}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor -%}
{{- rest[0].content | trim }}{{ '<|eot_id|>' -}}
{%- set rest = rest[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif -%}
{%- set f = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' -}}
{{- (f.arguments | tojson) + '}<|eot_id|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt -}}
"""

KIMI_K2 = """
{%- if tools -%}
{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson(separators=(',', ':'))) + '<|im_end|>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>\\n' -}}
{%- endif -%}
{{- {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, '<|im_system|>') -}}
{{- (m.get('name') or m.role) + '<|im_middle|>' -}}
{{- '## Return of ' + m.tool_call_id + '\\n' if m.role == 'tool' -}}
{{- m.content -}}
{%- if m.get('tool_calls') -%}
{{- '<|tool_calls_section_begin|>' -}}
{%- for call in m.tool_calls -%}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_section_end|>' -}}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt -}}
"""

KIMI_K2_THINKING = (
    KIMI_K2.replace(
        "\n",
        "\n{%- set ns = namespace(final=-1) -%}{%- for m in messages -%}"
        "{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.final = loop.index0 -%}{%- endif -%}"
        "{%- endfor -%}\n",
        1,
    )
    .replace("tojson(separators=(',', ':'))", "tojson")
    .replace("Moonshot AI.<|im_end|>\\n", "Moonshot AI.<|im_end|>")
    .replace(
        "{{- m.content -}}",
        "{%- if m.role == 'assistant' -%}"
        "{{- '<think>' + (m.reasoning_content or '' if loop.index0 > ns.final else '') + '</think>' -}}"
        "{%- endif -%}\n{{- m.content -}}",
    )
)

_BAR, _BLANK = "\uff5c", "\u2581"
DEEPSEEK_V31 = """{{- bos_token -}}
{%- for m in messages if m.role == 'system' %}{{ '\\n\\n' if not loop.first }}{{ m.content }}{% endfor -%}
{%- set ns = namespace(last='') -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{- '<|User|>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{{- '<|Assistant|></think>' if ns.last == 'user' -}}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '<|tool calls begin|>' -}}
{%- for call in m.tool_calls -%}
{{- '<|tool call begin|>' + call.function.name + '<|tool sep|>' + call.function.arguments + '<|tool call end|>' -}}
{%- endfor -%}
{{- '<|tool calls end|>' -}}
{%- endif -%}
{{- '<|end of sentence|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|tool output begin|>' + m.content + '<|tool output end|>' -}}
{%- endif -%}
{%- set ns.last = m.role if m.role != 'system' else ns.last -%}
{%- endfor -%}
{{- '<|Assistant|></think>' if add_generation_prompt and ns.last == 'user' -}}
"""
DEEPSEEK_V31 = re.sub(r"<\|(.*?)\|>", lambda token: f"<{_BAR}{token[1].replace(' ', _BLANK)}{_BAR}>", DEEPSEEK_V31)

SMOLLM2 = """
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""

TEMPLATES = {
    "qwen3": QWEN3,
    "qwen3-thinking": QWEN3_THINKING,
    "llama-3": LLAMA_3,
    "kimi-k2": KIMI_K2,
    "kimi-k2-thinking": KIMI_K2_THINKING,
    "deepseek-v3.1": DEEPSEEK_V31,
    "smollm2": SMOLLM2,
}
BOS = {"llama-3": "<|begin_of_text|>", "deepseek-v3.1": f"<{_BAR}begin{_BLANK}of{_BLANK}sentence{_BAR}>"}

OWN = """{{ '<|im_start|>tools:' + (tools | tojson) + '<|im_end|>\n' if tools }}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + ' says:\\n' }}
{{- '<think>' + (m.reasoning_content or '') + '</think>' if m.role == 'assistant' }}
{{- m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{{- '<|im_end|>\\n' }}
{%- endfor -%}
{{- '<|im_start|>assistant says:\\n<think>' if add_generation_prompt -}}
"""
"""A format of nobody, which opens the reasoning and keeps it."""


def model_dir(directory, tokenizer, template, *, bos=""):
    """Write a model directory that has a tokenizer and a template."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": bos or None}))
    return directory
