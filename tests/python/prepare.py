# SPDX-License-Identifier: Apache-2.0
# needs: tokenizers numpy safetensors jinja2
"""zspill.prepare on small tokenizers and templates made here."""

import contextlib
import io
import json
import os
import tempfile
import unittest

import numpy as np
import safetensors.numpy
import tokenizers

from zspill import prepare

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Writes a mark before the last assistant turn only, as Qwen3 does with <think>.
LAST_DIFFERS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}hmm {% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Names how many messages follow: no prefix ever matches.
COUNTS = (
    "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}"
)


def make_tokenizer(folder, template=PLAIN, **config):
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={
                c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
            },
            merges=[],
        )
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(
        ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    )
    core.save(os.path.join(folder, "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
    if template is not None:
        settings["chat_template"] = template
    settings.update(config)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)
    return core


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": roles[t[0]], "content": t[2:]} for t in turns]}


class Prepare(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        self.out = os.path.join(self.folder, "out.safetensors")

    def data(self, *rows, name="data.jsonl"):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            for row in rows:
                file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
        return path

    def call(self, *args):
        """(exit code, stdout, stderr)"""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = prepare.main([*args, "--tokenizer", self.folder, "--out", self.out])
        return code, out.getvalue(), err.getvalue()

    def made(self, *args):
        code, out, err = self.call(*args)
        self.assertEqual(code, 0, err)
        return safetensors.numpy.load_file(self.out), out

    def refused(self, *args):
        if os.path.exists(self.out):
            os.remove(self.out)
        code, _, err = self.call(*args)
        self.assertEqual(code, 1, err)
        self.assertEqual([n for n in os.listdir(self.folder) if n.startswith("out")], [])
        return err

    def targets(self, core, arrays, row=0):
        labels = arrays["labels"][row]
        return core.decode([int(x) for x in labels[labels != -100]], skip_special_tokens=False)

    def test_only_the_assistant_counts(self):
        core = make_tokenizer(self.folder)
        data = self.data(chat("s:be brief", "u:hi", "a:hé!", "u:more", "a:ok"))
        arrays, _ = self.made(data, "--seq-len", "64")
        self.assertEqual(self.targets(core, arrays), "hé!<|end|>ok<|end|>")
        for array in arrays.values():
            self.assertEqual((array.dtype, array.shape), (np.dtype(np.int32), (1, 64)))
        counted = arrays["labels"] != -100
        np.testing.assert_array_equal(arrays["labels"][counted], arrays["input_ids"][counted])
        whole = core.decode([int(x) for x in arrays["input_ids"][0]], skip_special_tokens=False)
        self.assertTrue(whole.startswith("<s><|system|>be brief<|end|>\n<|user|>hi<|end|>"), whole)
        self.assertTrue(whole.endswith("<pad>"), whole)

    def test_packing_restarts_positions(self):
        core = make_tokenizer(self.folder)
        # 3 tokens of frame and 4 of text, then 2 of frame and a line break each: 11 in all.
        rows = [chat("u:aaaa", f"a:{c * n}") for c, n in (("x", 5), ("y", 20), ("z", 5))]
        arrays, out = self.made(self.data(*rows), "--seq-len", "34")
        sizes = [
            len(core.encode("<s><|user|>aaaa<|end|>\n<|assistant|><|end|>\n").ids) + n
            for n in (5, 20, 5)
        ]
        self.assertEqual(sizes, [16, 31, 16])
        self.assertEqual(arrays["input_ids"].shape, (2, 34))
        np.testing.assert_array_equal(
            arrays["position_ids"][0], [*range(16), *range(16), *range(2)]
        )
        np.testing.assert_array_equal(arrays["position_ids"][1], [*range(31), *range(3)])
        self.assertEqual(self.targets(core, arrays, 0), "xxxxx<|end|>zzzzz<|end|>")
        self.assertTrue((arrays["labels"][arrays["position_ids"] == 0] == -100).all())
        self.assertIn("2 rows of 34 from 3 documents, 63 tokens", out)
        arrays, _ = self.made(self.data(*rows), "--seq-len", "34", "--no-packing")
        self.assertEqual(arrays["input_ids"].shape, (3, 34))
        self.assertNotIn("position_ids", arrays)

    def test_same_input_same_bytes(self):
        make_tokenizer(self.folder)
        data = self.data(*[chat("u:q" + "a" * (i % 7), "a:r" * (1 + i % 5)) for i in range(50)])
        contents = []
        for _ in range(2):
            self.made(data, "--seq-len", "64")
            with open(self.out, "rb") as file:
                contents.append(file.read())
        self.assertEqual(contents[0], contents[1])

    def test_earlier_turns_written_in_another_way(self):
        core = make_tokenizer(self.folder, LAST_DIFFERS)
        data = self.data(chat("u:1", "a:one"), chat("u:1", "a:one", "u:2", "a:two"))
        err = self.refused(data, "--seq-len", "64")
        self.assertIn("row 2 (", err)
        self.assertIn("line 2): message 2 (assistant): the template writes the conversation", err)
        self.assertIn("--targets last", err)
        self.assertIn("1 of 2 rows cannot be used; --skip-bad leaves them out", err)
        arrays, out = self.made(data, "--seq-len", "64", "--skip-bad")
        self.assertIn("from 1 documents", out)
        self.assertIn("1 skipped", out)
        arrays, _ = self.made(data, "--seq-len", "64", "--targets", "last", "--no-packing")
        self.assertEqual(self.targets(core, arrays, 0), "hmm one<|end|>")
        self.assertEqual(self.targets(core, arrays, 1), "hmm two<|end|>")

    def test_template_without_prefixes(self):
        make_tokenizer(self.folder, COUNTS)
        err = self.refused(self.data(chat("u:1", "a:one")), "--seq-len", "64")
        self.assertIn("row 1 (", err)
        self.assertIn("message 2 (assistant)", err)
        self.assertNotIn("--targets last", err)

    def test_no_target(self):
        make_tokenizer(self.folder)
        err = self.refused(self.data(chat("u:a", "a:b"), chat("u:a")), "--seq-len", "64")
        self.assertIn("row 2 (", err)
        self.assertIn("no target is left: no message is the assistant's", err)
        long = self.data(chat("u:" + "a" * 100, "a:b"))
        err = self.refused(long, "--seq-len", "64", "--too-long", "truncate")
        self.assertIn("row 1 (", err)
        self.assertIn("no target is left", err)

    def test_too_long(self):
        core = make_tokenizer(self.folder)
        data = self.data(chat("u:a", "a:" + "b" * 100))
        err = self.refused(data, "--seq-len", "32")
        self.assertIn("row 1 (", err)
        self.assertIn("108 tokens do not fit in --seq-len 32", err)
        arrays, _ = self.made(data, "--seq-len", "32", "--too-long", "truncate")
        self.assertEqual(self.targets(core, arrays), "b" * 26)

    def test_bad_rows(self):
        make_tokenizer(self.folder)
        for row, message in (
            ('{"messages"', "line 1: not JSON"),
            ('{"prompt": "x"}', 'line 1: needs an object with "messages" or "text"'),
            ('{"messages": []}', '"messages" must be a list that is not empty'),
            ('{"messages": [{"content": "x"}]}', 'message 1 must be an object with a "role"'),
            ('{"text": 3}', '"text" must be a string'),
            ('{"text": ""}', "no target is left: the text has fewer than two tokens"),
        ):
            with self.subTest(row):
                self.assertIn(message, self.refused(self.data(row), "--seq-len", "8"))
        self.assertIn("no rows are left of 0", self.refused(self.data(), "--seq-len", "8"))
        missing = os.path.join(self.folder, "absent.jsonl")
        self.assertIn("cannot read", self.refused(missing, "--seq-len", "8"))
        self.assertIn("--seq-len 1: needs at least 2", self.refused(missing, "--seq-len", "1"))

    def test_template_that_raises(self):
        make_tokenizer(self.folder, "{{ raise_exception('roles must alternate') }}")
        err = self.refused(self.data(chat("u:a", "a:b")), "--seq-len", "32")
        self.assertIn("row 1 (", err)
        self.assertIn("the chat template refuses it: roles must alternate", err)

    def test_where_templates_come_from(self):
        core = make_tokenizer(self.folder, None)
        data = self.data(chat("u:a", "a:b"))
        self.assertIn("give one with --chat-template FILE", self.refused(data, "--seq-len", "32"))
        other = os.path.join(self.folder, "other.jinja")
        with open(other, "w", encoding="utf-8") as file:
            file.write(
                PLAIN.replace(
                    "{{ m.content }}", "{% generation %}{{ m.content }}!{% endgeneration %}"
                )
            )
        arrays, _ = self.made(data, "--seq-len", "32", "--chat-template", other)
        self.assertEqual(self.targets(core, arrays), "b!<|end|>")
        # A list of named templates.
        make_tokenizer(
            self.folder,
            [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}],
        )
        arrays, _ = self.made(data, "--seq-len", "32")
        self.assertEqual(self.targets(core, arrays), "b<|end|>")
        # A file beside the tokenizer wins.
        os.rename(other, os.path.join(self.folder, "chat_template.jinja"))
        arrays, _ = self.made(data, "--seq-len", "32")
        self.assertEqual(self.targets(core, arrays), "b!<|end|>")

    def test_template_arguments(self):
        core = make_tokenizer(
            self.folder,
            PLAIN.replace("{{ m.content }}", "{{ m.content }}{% if loud is false %}?{% endif %}"),
        )
        data = self.data(chat("u:a", "a:b"))
        arrays, _ = self.made(data, "--seq-len", "32", "--template-arg", "loud=false")
        self.assertEqual(self.targets(core, arrays), "b?<|end|>")
        self.assertIn(
            "needs NAME=VALUE", self.refused(data, "--seq-len", "8", "--template-arg", "x")
        )

    def test_plain_text(self):
        core = make_tokenizer(self.folder)
        path = self.data("0123456789", name="book.txt")  # and a line break, and </s>
        arrays, _ = self.made(path, "--seq-len", "5")
        ids = arrays["input_ids"]
        self.assertEqual(ids.shape, (3, 5))
        self.assertEqual(
            core.decode([int(x) for x in ids.ravel()], skip_special_tokens=False),
            "0123456789\n</s><pad><pad><pad>",
        )
        self.assertEqual([int((row != -100).sum()) for row in arrays["labels"]], [4, 4, 1])
        arrays, _ = self.made(self.data({"text": "ab"}, {"text": "cd"}), "--seq-len", "8")
        np.testing.assert_array_equal(arrays["position_ids"][0], [0, 1, 2, 0, 1, 2, 0, 1])

    def test_no_tokenizer(self):
        err = self.refused(self.data(chat("u:a", "a:b")), "--seq-len", "32")
        self.assertIn("no tokenizer.json in", err)


if __name__ == "__main__":
    unittest.main()
