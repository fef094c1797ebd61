"""The text: sources of Python's standard library, and its docstrings as questions and answers."""

import ast
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "ensurepip"}
KINDS = {
    ast.Module: "module",
    ast.ClassDef: "class",
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "function",
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
HELD_OUT_SHARE = 20  # one file in so many, chosen by the checksum of its path

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SPECIAL_TOKENS = (BEGIN, END, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


@dataclass(frozen=True)
class SourceFile:
    name: str  # path inside the standard library
    text: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % HELD_OUT_SHARE == 0

    def dialogues(self) -> Iterator[tuple[str, str]]:
        """(question, docstring) of every documented module, class and function."""
        module = self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from _documented(ast.parse(self.text), module)


def _documented(node: Documented, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring:
            kind = (
                "module" if isinstance(node, ast.Module) else "class" if isinstance(node, ast.ClassDef) else "function"
            )
            yield f"What is the {kind} {name}?", docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")


def read_corpus() -> list[SourceFile]:
    """Files of the running Python's standard library in the order of their names, what a build generates left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        folders = set(relative.parts[:-1])
        is_generated = path.name.startswith("_sysconfigdata") or any(name.startswith("config-") for name in folders)
        if is_generated or folders & SKIPPED_FOLDERS:
            continue
        text = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
        files.append(SourceFile(relative.as_posix(), text))
    return files


def encode(files: list[SourceFile], tokenizer: Tokenizer) -> list[int]:
    """One stream: each file between the marks of begin and end, then its dialogues in the chat format."""
    begin, end, user, assistant = (token_id(tokenizer, token) for token in SPECIAL_TOKENS)
    questions_answers = [pair for file in files for pair in file.dialogues()]
    texts = [file.text for file in files] + [text for pair in questions_answers for text in pair]
    encoded = [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
    stream = [token for ids in encoded[: len(files)] for token in (begin, *ids, end)]
    dialogues = iter(encoded[len(files) :])
    for question, answer in zip(dialogues, dialogues, strict=True):
        stream += [begin, user, *question, assistant, *answer, end]
    return stream


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def train_tokenizer(files: list[SourceFile], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every text can be encoded, and a text prompt begins with the mark of a beginning."""
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    begin = token_id(tokenizer, BEGIN)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]),
        ]
    )
    return tokenizer
