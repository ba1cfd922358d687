#!/usr/bin/env python3
"""Reference ids of a small tokenizer in SentencePiece's way, from Hugging Face's tokenizers.
metaspace.py DIR                 writes DIR/values.json for DIR/tokenizer.json
metaspace.py DIR --train FILE..  first trains that tokenizer on the files

tokenizer.json has the members of Mixtral-8x7B's: a normalizer of Prepend and Replace, byte fallback, three special tokens. Its
later spelling, the pre-tokenizer Metaspace, is derived from it, with each prepend_scheme."""
import json, os, sys

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPACE = "\u2581"
SPECIAL = ("<unk>", "<s>", "</s>")
STRINGS = (
    "", " ", "  ", "a", " a", "a ", "  two  spaces  ", "Hello world", "The engine reads a checkpoint.", "tabs\tand\nlines\r\n\n",
    "MoE: 8x7B, 2 of 8 experts, 1e-5!", SPACE, SPACE + "a", "a" + SPACE + "b", " " + SPACE + " ", "漢字 and かな", "🙂 smiles 🙂🙂",
    "e\u0301 is not \u00e9", "\u00a0no-break\u3000wide", "\u0000zero", "<s>", "<s>a", "<s> a", "a<s>b", "a <s> b", " <s>", "<s><s>",
    "</s> after", "<s>[INST] Say hi. [/INST] Hi.</s>[INST] Again [/INST]", "<unk>", "<0x0A>", "< s >", "x = {\n    'y': [1, 2, 3],\n}\n",
    "long " * 12, "ÀÉÎõü ñ ß", "\u2028line\u2029paragraph", "mixed" + SPACE + " " + SPACE + "spaces",
)


def train(files):
    t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    t.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never", True)  # merges stay within words
    names = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    t.train(files, trainers.BpeTrainer(vocab_size=660, special_tokens=names, limit_alphabet=110, show_progress=False))
    t.pre_tokenizer = None
    t.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    out = json.loads(t.to_str())
    out["added_tokens"] = [dict(a, normalized=False) for a in out["added_tokens"] if a["content"] in SPECIAL]
    return out


def spellings(root):
    yield "normalizer", root
    for scheme in ("always", "first", "never"):
        meta = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
        yield scheme, dict(root, normalizer=None, pre_tokenizer=meta)


def main():
    path = os.path.join(sys.argv[1], "tokenizer.json")
    if len(sys.argv) > 3 and sys.argv[2] == "--train":
        with open(path, "w", encoding="utf-8") as f:
            json.dump(train(sys.argv[3:]), f, ensure_ascii=False, indent=0)
            f.write("\n")
    with open(path, encoding="utf-8") as f:
        root = json.load(f)
    strings = [{"text": text} for text in STRINGS]
    for name, edited in spellings(root):
        t = Tokenizer.from_str(json.dumps(edited))
        for entry in strings:
            ids = t.encode(entry["text"], add_special_tokens=False).ids
            entry[name] = {"ids": ids, "decoded": t.decode(ids, skip_special_tokens=False)}
    with open(os.path.join(sys.argv[1], "values.json"), "w", encoding="utf-8") as f:
        json.dump({"strings": strings}, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
