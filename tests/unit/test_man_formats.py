"""The pages of section 5 against the code: every field, byte and number that they give."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import struct
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from tests.unit.mdoc import MAN, Page, fields, literal_blocks
from toastkit import arrays, frames
from toastkit.frames import Array, Reference, unpack_extension
from toastkit.model import toast_format as file
from toastkit.session import commit, extents, gear_state, header, layout, lock, names, ring, run
from toastkit.session.feed import FeedMessage
from toastkit.session.upkeep import CACHE_FILE, LOGITS_FILE, TOKENS_FILE
from toastkit.store.precision import GEAR_BITS
from toastkit.store.writer import LAYOUT_KEY

FRAMES = Page(MAN / "man5" / "toast-frames.5")
SESSION = Page(MAN / "man5" / "toast-session.5")


def wire_type(hint: Any) -> str:
    """A field's annotation in the words of the page."""
    words = {str: "string", int: "integer", float: "number", bool: "boolean", bytes: "binary",
             list: "list", dict: "map", Array: "array"}  # fmt: skip
    if get_origin(hint) is UnionType:
        parts = [p for p in get_args(hint) if p not in (type(None), Reference)]
        return " or ".join(wire_type(part) for part in parts)
    return words[get_origin(hint) or hint]


def field_types(cls: type) -> dict[str, str]:
    """Field -> type of a frame's dataclass, as the page has it."""
    loose = {"logits": Array, "entropy": float | None}  # Any, since they may be on the device
    hints = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind = wire_type(loose[field.name] if hint is Any else hint)
        if field.default is None:
            kind += ", optional"
        elif field.default is not dataclasses.MISSING:
            kind += f", default {str(field.default).lower()}"
        found[field.name] = kind
    del found["extra"]
    return found


def test_fields_of_the_frames() -> None:
    assert re.findall(r"^\.Ss (.+)$", FRAMES.part("KINDS"), re.MULTILINE) == list(frames.KINDS)
    for kind, cls in frames.KINDS.items():
        assert fields(FRAMES.part("KINDS", kind)) == field_types(cls)


def dumped(source: str) -> list[bytes]:
    """The hex dumps of a piece of source, one a display."""
    found = []
    for block in literal_blocks(source):
        rows = [re.match(r"(?:[0-9a-f]{2}(?: |$))+", line) for line in block.splitlines()]
        found.append(bytes.fromhex("".join(row[0] for row in rows if row)))
    return found


def test_arrays_byte_by_byte() -> None:
    inline, reference = (
        msgpack.unpackb(data, ext_hook=unpack_extension) for data in dumped(FRAMES.part("ARRAYS"))
    )
    assert (inline.dtype, inline.shape) == ("float32", (2,))
    assert memoryview(inline.data).cast("f").tolist() == [1.0, -2.0]
    assert reference == Reference(3, 12, "float32", (4096,))
    listed = re.findall(r"^\.Li (\w+)", FRAMES.part("ARRAYS"), re.MULTILINE)
    assert listed == list(arrays.ITEM_BYTES)


def test_feed_messages() -> None:
    part = FRAMES.part("THE FEED")
    assert list(fields(part)) == list(FeedMessage._fields)
    assert [msgpack.unpackb(data) for data in dumped(part)] == [{"pos": 12, "id": 43}]


def test_ring_as_described(tmp_path: Path) -> None:
    """A reader made from the page alone finds the second step."""
    writer = ring.RingWriter(tmp_path / "logits", vocab=5)
    for step, summary in ((1.0, None), (2.0, ring.Summary(0.5, -0.25, 3))):
        row = memoryview(struct.pack("<5f", *[step] * 5)).cast("f")
        writer.write(row, lambda summary=summary: summary)
    data = (tmp_path / "logits").read_bytes()
    version, vocab, slots = struct.unpack_from("<3I", data, 8)
    assert (data[:8], version, vocab) == (b"toastrng", 3, 5) and not any(data[20:64])
    stride = 64 + -(-4 * vocab // 64) * 64
    start = 64 + (2 - 1) % slots * stride
    assert struct.unpack_from("<QddI", data, start) == (2, 0.5, -0.25, 3)
    assert math.isnan(struct.unpack_from("<d", data, 64 + 8)[0])
    assert struct.unpack_from("<5f", data, start + 64) == (2.0,) * 5
    assert len(data) == 64 + slots * stride


def written_header() -> dict[str, dict]:
    """The maps of a real session.msgpack, by the subsection that describes them."""
    tensor = layout.Tensor("keys", "float32", (1, 1, 2, 4), 2, [layout.Range(0, 32, 7)])
    layer = layout.Layer("KVCache", {"offset": 2}, [tensor], [])
    records = layout.TokenRecord([(0, 2)], 2, 7), layout.LogitsRecord(0, 4, 7)
    point = layout.SavepointRecord(1, [None])
    whole = layout.Header("ab", 1, 2, *records, [layer], [point], "seal")
    envelope = msgpack.unpackb(header.encode_header(whole))
    body = msgpack.unpackb(envelope["body"])
    (stored,) = body["layers"]
    return {
        "Envelope": envelope, "Body": body, "Tokens": body["tokens"], "Logits": body["logits"],
        "Layer": stored, "Tensor": stored["tensors"][0], "Savepoint": body["checkpoints"][0],
    }  # fmt: skip


def test_fields_of_the_header() -> None:
    for part, written in written_header().items():
        described = fields(SESSION.part("THE HEADER", part))
        assert list(described) == list(written)
        for name, value in written.items():
            assert wire_type(type(value)) == described[name].removesuffix(" or nil"), name


def test_kinds_of_layers() -> None:
    rows = re.findall(r"^\.It (.*?)Ta (.*?)Ta ?(.*)$", SESSION.part("THE HEADER"), re.MULTILINE)
    found: dict[str, tuple] = {}
    for kind, settings, tensors in rows[1:] if rows[0][0].startswith("Sy") else rows:
        name = kind.strip() or next(reversed(found))
        earlier = found.get(name, ((), ()))
        found[name] = (earlier[0] + tuple(settings.split()), earlier[1] + tuple(tensors.split()))
    listed = ("0", "1", "...", "left_padding", "lengths")
    assert found == {
        name: (kind.settings, listed if name == "ArraysCache" else kind.tensors)
        for name, kind in layout.KINDS.items()
    }
    assert [kind.grows for kind in layout.KINDS.values()] == [True] * 4 + [False] * 3


def test_files_of_a_session() -> None:
    found = re.findall(r"^\.It Pa (\S+)$", SESSION.part("FILES"), re.MULTILINE)
    inside = (run.FEED_FILE, run.RING_FILE, run.HANDOVER_FILE, run.ALIVE_FILE)
    assert found == [
        names.HEADER_FILE, TOKENS_FILE, CACHE_FILE, LOGITS_FILE, lock.LOCK_FILE,
        f"{names.HEADER_FILE}.tmp", gear_state.GEAR_FILE, "runs/ID/",
        *(f"runs/ID/{f}" for f in inside),
    ]  # fmt: skip


PIPE_BUF = 512  # POSIX's minimum: what is written whole, whoever else writes


def test_messages_are_written_whole() -> None:
    longest = FeedMessage(2**53 - 1, 2**32 - 1, "high", True, "high")
    assert len(msgpack.packb(longest._asdict())) <= PIPE_BUF


def test_numbers() -> None:
    slots = inspect.signature(ring.RingWriter).parameters["slots"].default
    for page, phrase in (
        (FRAMES, f"version {frames.SCHEMA_VERSION} of the schema"),
        (FRAMES, f"a frame of more than {frames.MAX_FRAME_BYTES >> 20} MiB"),
        (FRAMES, f"more than {frames.MAX_NESTING} deep"),
        (FRAMES, f"{ {8: 'eight'}[slots] } steps later"),
        (FRAMES, f"at most {PIPE_BUF} bytes"),
        (SESSION, f"schema {layout.SCHEMA_VERSION}"),
        (SESSION, f"at most {header.MAX_HEADER_BYTES >> 20} MiB"),
        (SESSION, f"a multiple of {extents.ALIGNMENT:,} bytes"),
        (SESSION, f"a block is {layout.BLOCK_ROWS} rows"),
        (SESSION, f"There are {commit.MAX_SLICES} slices at most"),
        (SESSION, f"at most {names.MAX_NAME_BYTES} bytes"),
        (SESSION, ", ".join(list(layout.ITEM_BYTES)[:-1])),
    ):
        assert phrase in page.words(), phrase


def test_the_page_of_the_file_has_its_names_and_numbers() -> None:
    text = (MAN / "man5" / "toast-file.5").read_text()
    gears = [rf"\.Li {gear}\nhas {bits}\b" for gear, bits in GEAR_BITS.items()]
    assert all(re.search(gear, text) for gear in gears)
    prefixes = file.FILE_PREFIX, file.PAD_PREFIX, file.GEAR_PREFIX, file.EXPERTS_PREFIX
    keys = file.VERSION_KEY, file.LAYERS_KEY, file.EXPERTS_KEY, file.CHECKSUMS_KEY, LAYOUT_KEY
    groups = file.FILES_GROUP, file.OUTSIDE_GROUP, file.LAYER_GROUP.format(0)
    for said in (
        *(f".It Li {prefix}" for prefix in prefixes), *(f".It Li {key}\n" for key in keys),
        *(f"Li {group}" for group in groups),
        *(f".Pa {name}" for name in (file.OUTSIDE_FILE, file.LAYER_FILE.format(0))),
        f"at a multiple of {file.PAGE} bytes, every other tensor at one of {file.ITEM_ALIGNMENT}.",
        f"{file.DIGEST_BYTES} bytes long", f"version {file.VERSION},",
        f"version {file.EXPERT_MAJOR_VERSION}, which",
        f"at a multiple of {file.ITEM_ALIGNMENT} bytes from",
    ):  # fmt: skip
        assert said in text, said
