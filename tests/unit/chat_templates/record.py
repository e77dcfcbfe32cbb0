"""Records in rendered.json what transformers makes of the templates and conversations here.

The templates are written in the manner of public ones. `python record.py` with transformers 5.23.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def cases() -> dict[str, dict]:
    """Name -> template, messages and settings of a rendering."""
    given = json.loads((HERE / "conversations.json").read_text(encoding="utf-8"))
    return {
        f"{path.stem}, {name}{', tools' if tools else ''}": {
            "template": path.read_text(encoding="utf-8"),
            "messages": messages,
            "tools": given["tools"] if tools else None,
            "add_generation_prompt": tools,
        }
        for path in sorted(HERE.glob("*.jinja"))
        for name, messages in given["conversations"].items()
        for tools in (False, True)
    }


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    recorded = {}
    for name, case in cases().items():
        template, messages = case.pop("template"), case.pop("messages")
        try:
            texts, _ = render_jinja_template([messages], chat_template=template, **case, **SPECIAL)
            recorded[name] = texts[0]
        except Exception:
            recorded[name] = None  # what the message says is Jinja's, and ours alike
    text = json.dumps(recorded, ensure_ascii=False, indent=1)
    (HERE / "rendered.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
