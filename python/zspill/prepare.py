# SPDX-License-Identifier: Apache-2.0
"""Makes token files for `zspill train` out of conversations or plain text.

A token file is a safetensors file with I32 arrays [rows, seq]: input_ids, labels (-100: not
counted; unshifted, as in transformers) and, where several documents share a row, position_ids,
which return to 0 where a document starts.

Inputs: JSON lines with "messages" (a conversation) or "text" (a document), or any other file as
one plain-text document. Of a conversation only what the assistant says is a target, its end of turn
included. That part is found by rendering prefixes of the conversation with the chat template and
comparing: a conversation of which they are no prefixes is refused by its number.
"""

import argparse
import bisect
import json
import os
import sys

try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    import numpy as np
    import safetensors.numpy
    import tokenizers
except ImportError as missing:
    sys.exit(f"zspill.prepare: {missing}; run: pip install tokenizers numpy safetensors jinja2")

IGNORED = -100
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class InputError(Exception):
    """Something about the files or options that the user has to change."""


class RowError(Exception):
    """A row that cannot be used; where is filled in by who knows it."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks in templates: the body is rendered, the mark is not needed."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


class Tokenizer:
    """A Hugging Face tokenizer directory: tokenizer.json, special tokens, chat template."""

    def __init__(self, path, chat_template=None, template_args=None):
        file = os.path.join(path, "tokenizer.json")
        if not os.path.isfile(file):
            raise InputError(
                f"no tokenizer.json in {path}: give the directory of a Hugging Face model or tokenizer"
            )
        try:
            self.core = tokenizers.Tokenizer.from_file(file)
        except Exception as error:  # the binding raises plain Exception
            raise InputError(f"cannot read {file}: {error}") from error
        self.core.no_truncation()
        self.core.no_padding()
        config_file = os.path.join(path, "tokenizer_config.json")
        config = _read_json(config_file) if os.path.exists(config_file) else {}
        self.special = self._special_tokens(path, config)
        self.special_ids = {
            token_id
            for token_id, token in self.core.get_added_tokens_decoder().items()
            if token.special
        }
        self.template_args = template_args or {}
        self._templates = self._find_templates(path, config, chat_template)
        self._compiled = {}

    @staticmethod
    def _special_tokens(path, config):
        special = {}
        map_file = os.path.join(path, "special_tokens_map.json")
        for source in (config, _read_json(map_file) if os.path.exists(map_file) else {}):
            for name in SPECIAL_NAMES:
                value = source.get(name)
                if isinstance(value, dict):
                    value = value.get("content")
                if isinstance(value, str):
                    special.setdefault(name, value)
        return special

    @staticmethod
    def _find_templates(path, config, given):
        """{name: template text}; what transformers would take, unless one is given."""
        beside = os.path.join(path, "chat_template.jinja")
        if given is None and os.path.exists(beside):
            given = beside
        if given is not None:
            try:
                with open(given, encoding="utf-8") as file:
                    return {"default": file.read()}
            except (OSError, ValueError) as error:
                raise InputError(f"cannot read the chat template {given}: {error}") from error
        template = config.get("chat_template")
        if isinstance(template, list):
            return {entry["name"]: entry["template"] for entry in template}
        return {"default": template} if isinstance(template, str) else {}

    def _template(self, name):
        if name not in self._templates:
            if not self._templates:
                raise InputError(
                    "this tokenizer has no chat template: give one with --chat-template FILE"
                )
            raise InputError(
                f"no chat template named '{name}' among {', '.join(sorted(self._templates))}:"
                " give one with --chat-template FILE"
            )
        if name not in self._compiled:
            # Today's date is left out on purpose (strftime_now): the same input gives the same file.
            env = jinja2.sandbox.ImmutableSandboxedEnvironment(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=[_Generation, jinja2.ext.loopcontrols],
            )
            env.filters["tojson"] = lambda value, indent=None, **_: json.dumps(
                value, ensure_ascii=False, indent=indent
            )

            def raise_exception(message):
                raise jinja2.exceptions.TemplateError(message)

            env.globals["raise_exception"] = raise_exception
            try:
                self._compiled[name] = env.from_string(self._templates[name])
            except jinja2.exceptions.TemplateError as error:
                raise InputError(f"the chat template '{name}' is not valid: {error}") from error
        return self._compiled[name]

    def render(self, messages, tools, generation_prompt):
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._template(name)
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.special,
                **self.template_args,
            )
        except (
            jinja2.exceptions.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise RowError(f"the chat template refuses it: {error}") from error

    def encode(self, text, add_special_tokens=False):
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def token_id(self, name):
        token = self.special.get(name)
        return None if token is None else self.core.token_to_id(token)

    def padding_id(self):
        for name in ("pad_token", "eos_token"):
            token = self.token_id(name)
            if token is not None:
                return token
        return 0


def _turn_end(tokenizer, ids, start, end):
    """Without what a template writes after the end-of-turn token (a line break, as a rule)."""
    for i in range(end - 1, start - 1, -1):
        if ids[i] in tokenizer.special_ids:
            tail = tokenizer.core.decode(ids[i + 1 : end], skip_special_tokens=False)
            return i + 1 if not tail.strip() else end
    return end


def _check_messages(messages):
    if not isinstance(messages, list) or not messages:
        raise RowError('"messages" must be a list that is not empty')
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f'message {i} must be an object with a "role"')


def encode_chat(tokenizer, messages, tools=None, targets="all"):
    """(ids, labels) of one conversation. targets: "all" assistant turns or the "last" one only."""
    _check_messages(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RowError("no target is left: no message is the assistant's")
    if targets == "last":
        turns = turns[-1:]
    text = tokenizer.render(messages, tools, False)
    ids = tokenizer.encode(text)
    if not ids:
        raise RowError("no target is left: the chat template renders nothing")
    labels = [IGNORED] * len(ids)

    def boundary(turn, count, generation_prompt, what):
        """The tokens of text that the first count messages make up."""
        prefix = tokenizer.render(messages[:count], tools, generation_prompt)
        prefix_ids = tokenizer.encode(prefix)
        if not text.startswith(prefix) or ids[: len(prefix_ids)] != prefix_ids:
            fix = "" if turn == turns[-1] else "; --targets last takes the last turn only"
            raise RowError(
                f"message {turn + 1} (assistant): the template writes the conversation up to its {what}"
                f" in another way once more messages follow, so its tokens cannot be told apart{fix}"
            )
        return len(prefix_ids)

    for turn in turns:
        start = boundary(turn, turn, True, "beginning")
        end = len(ids) if turn == len(messages) - 1 else boundary(turn, turn + 1, False, "end")
        end = _turn_end(tokenizer, ids, start, end)
        labels[start:end] = ids[start:end]
    # The first token is predicted from nothing.
    labels[0] = IGNORED
    return ids, labels


def encode_text(tokenizer, text):
    """(ids, labels) of one document, with the end-of-text token where the tokenizer has one."""
    ids = tokenizer.encode(text, add_special_tokens=True)
    end = tokenizer.token_id("eos_token")
    if ids and end is not None and ids[-1] != end:
        ids = ids + [end]
    return ids, [IGNORED] + ids[1:]


def read_rows(paths):
    """Yields (where, number, row): row is {"messages": ...} or {"text": ...}; number counts from 1
    over all files."""
    number = 0
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                if not path.endswith((".jsonl", ".json")):
                    number += 1
                    yield path, number, {"text": file.read()}
                    continue
                for line_number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    number += 1
                    where = f"{path} line {line_number}"
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise InputError(f"{where}: not JSON: {error}") from error
                    if not isinstance(row, dict) or not ("messages" in row or "text" in row):
                        raise InputError(
                            f'{where}: needs an object with "messages" or "text" on each line'
                        )
                    yield where, number, row
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from error


def encode_rows(tokenizer, rows, seq_len, targets="all", too_long="refuse"):
    """Yields (where, number, ids, labels or None, error or None). Documents of plain text are cut
    into pieces of seq_len; conversations are whole or an error."""
    for where, number, row in rows:
        try:
            if "messages" not in row:
                if not isinstance(row["text"], str):
                    raise RowError('"text" must be a string')
                ids, labels = encode_text(tokenizer, row["text"])
                if len(ids) < 2:
                    raise RowError("no target is left: the text has fewer than two tokens")
                for first in range(0, len(ids), seq_len):
                    piece = slice(first, first + seq_len)
                    # A piece of one token has nothing to predict.
                    if len(ids[piece]) > 1:
                        yield where, number, ids[piece], [IGNORED] + labels[piece][1:], None
                continue
            ids, labels = encode_chat(tokenizer, row["messages"], row.get("tools"), targets)
            if len(ids) > seq_len:
                if too_long != "truncate":
                    raise RowError(
                        f"{len(ids)} tokens do not fit in --seq-len {seq_len}: raise it, or give"
                        " --too-long truncate"
                    )
                ids, labels = ids[:seq_len], labels[:seq_len]
            if all(label == IGNORED for label in labels):
                raise RowError("no target is left")
            yield where, number, ids, labels, None
        except RowError as error:
            yield where, number, None, None, str(error)


def pack(documents, seq_len, packing):
    """Rows as lists of documents. Packing puts each document, in order, into the row whose rest it
    fills best, or starts a row."""
    rows = []
    room = []  # sorted (tokens left, row)
    for document in documents:
        size = len(document[0])
        at = bisect.bisect_left(room, (size, -1)) if packing else len(room)
        if at == len(room):
            rows.append([document])
            left, row = seq_len - size, len(rows) - 1
        else:
            left, row = room.pop(at)
            rows[row].append(document)
            left -= size
        if packing and left > 1:
            bisect.insort(room, (left, row))
    return rows


def to_arrays(rows, seq_len, padding_id, packing):
    """The arrays of a token file."""
    shape = (len(rows), seq_len)
    arrays = {
        "input_ids": np.full(shape, padding_id, np.int32),
        "labels": np.full(shape, IGNORED, np.int32),
    }
    if packing:
        arrays["position_ids"] = np.zeros(shape, np.int32)
    for r, row in enumerate(rows):
        at = 0
        for ids, labels in row:
            end = at + len(ids)
            arrays["input_ids"][r, at:end] = ids
            arrays["labels"][r, at:end] = labels
            if packing:
                arrays["position_ids"][r, at:end] = np.arange(len(ids))
            at = end
        if packing:
            arrays["position_ids"][r, at:] = np.arange(seq_len - at)
    return arrays


def write(arrays, path):
    unfinished = path + ".tmp"
    try:
        safetensors.numpy.save_file(arrays, unfinished)
        os.replace(unfinished, path)
    except Exception as error:  # OSError or the binding's own
        if os.path.exists(unfinished):
            os.remove(unfinished)
        raise InputError(f"cannot write {path}: {error}") from error


def prepare(args):
    if args.seq_len < 2:
        raise InputError(f"--seq-len {args.seq_len}: needs at least 2")
    template_args = {}
    for pair in args.template_arg:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--template-arg {pair}: needs NAME=VALUE")
        try:
            template_args[name] = json.loads(value)
        except ValueError:
            template_args[name] = value
    tokenizer = Tokenizer(args.tokenizer, args.chat_template, template_args)
    documents, bad, seen = [], [], set()
    for where, number, ids, labels, error in encode_rows(
        tokenizer, read_rows(args.data), args.seq_len, args.targets, args.too_long
    ):
        seen.add(number)
        if error is None:
            documents.append((ids, labels))
        else:
            bad.append(f"row {number} ({where}): {error}")
    if bad and not args.skip_bad:
        shown = bad[:20] + ([f"... and {len(bad) - 20} more"] if len(bad) > 20 else [])
        raise InputError(
            "\n".join(shown)
            + f"\n{len(bad)} of {len(seen)} rows cannot be used; --skip-bad leaves them out"
        )
    if not documents:
        raise InputError(
            f"no rows are left of {len(seen)}" + (f"; the first: {bad[0]}" if bad else "")
        )
    rows = pack(documents, args.seq_len, not args.no_packing)
    arrays = to_arrays(rows, args.seq_len, tokenizer.padding_id(), not args.no_packing)
    write(arrays, args.out)
    for line in bad[:20]:
        print(f"skipped {line}", file=sys.stderr)
    tokens = sum(len(ids) for ids, _ in documents)
    counted = int((arrays["labels"] != IGNORED).sum())
    print(
        f"{args.out}: {len(rows)} rows of {args.seq_len} from {len(seen) - len(bad)} documents,"
        f" {tokens} tokens ({100 * tokens / arrays['labels'].size:.1f} % of the rows),"
        f" {counted} counted, {len(bad)} skipped"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m zspill.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", nargs="+", help=".jsonl files, or plain text")
    parser.add_argument(
        "--tokenizer", "--model", required=True, metavar="DIR", help="where tokenizer.json is"
    )
    parser.add_argument("--seq-len", type=int, required=True, metavar="N", help="tokens of a row")
    parser.add_argument("--out", required=True, metavar="FILE.safetensors")
    parser.add_argument(
        "--no-packing",
        action="store_true",
        help="one document a row, padded, instead of as many as fit",
    )
    parser.add_argument(
        "--targets",
        choices=("all", "last"),
        default="all",
        help="which assistant turns count (default all)",
    )
    parser.add_argument(
        "--too-long",
        choices=("refuse", "truncate"),
        default="refuse",
        help="conversations longer than --seq-len: refuse (default), or cut off their end",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out rows that cannot be used, and count them"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="instead of the tokenizer's own")
    parser.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for the template, as JSON or text: enable_thinking=false",
    )
    args = parser.parse_args(argv)
    try:
        prepare(args)
    except InputError as error:
        print(f"zspill.prepare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
