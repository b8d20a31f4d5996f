"""Messages to ask, from files of rows as people have them."""

import json

from serving.common import post

# Keys of a row that hold the first message of a user, in the order in which they are looked for.
KEYS = ("prompt", "question", "instruction", "turns", "messages", "conversations", "text")


def first_message(row):
    """The first message of a user in a row; `document` comes before the question about it."""
    found = next((row[key] for key in KEYS if row.get(key)), None)
    if isinstance(found, list):
        said = [turn for turn in found if isinstance(turn, str) or turn.get("role", turn.get("from")) in ("user", "human")]
        turn = said[0] if said else None
        found = turn if isinstance(turn, str) or turn is None else turn.get("content", turn.get("value"))
    if not isinstance(found, str):
        raise ValueError(f"a row has none of {', '.join(KEYS)} with a text of a user: {json.dumps(row)[:200]}")
    return (row["document"], found) if row.get("document") else ("", found)


def read_prompts(path):
    """Pairs of a document, which may be empty, and a message."""
    with open(path, encoding="utf-8") as rows:
        return [first_message(json.loads(row)) for row in rows if row.strip()]


def joined(document, question):
    return f"{document}\n\n{question}" if document else question


def pieces(server, pairs, tokens):
    """Messages: each piece of so many tokens of a document, by the server's tokenizer, with its question; questions alone where there is none."""
    messages, parts = [], []
    for document, question in pairs:
        if not document:
            messages.append(question)
            continue
        ids = json.loads(post(server, "/tokenize", {"prompt": document})[1])["tokens"]
        parts.append([(question, ids[at : at + tokens]) for at in range(0, max(1, len(ids) - tokens + 1), tokens)])
    # Of every document the first piece, then of every one the second, and so on.
    for place in range(max(map(len, parts), default=0)):
        for question, ids in (part[place] for part in parts if place < len(part)):
            text = json.loads(post(server, "/detokenize", {"tokens": ids})[1])["content"]
            messages.append(joined(text, question))
    return messages
