"""An answer as it is written, with drafting and plainly.

    python decode.py model.gguf "Once upon a time" runs/mine/draft
"""

import sys

import longdraft


def main(target_name, prompt, draft=None):
    target = longdraft.Target.open(target_name)
    # Without a draft, lookup proposes what stood earlier in the text.
    session = longdraft.Session(target, draft, lookup=None if draft else "merge")
    stream = session.generate(prompt, max_tokens=48, stream=True)
    for piece in stream:
        print(piece, end="", flush=True)
    answer = stream.answer
    print(f"\n{session.drafter}: {answer.tau:.2f} tokens per target pass, {answer.tokens_per_second:.0f} tok/s")

    # Drafting changes the time, never the text.
    plain = longdraft.Session(target).generate(prompt, max_tokens=48)
    assert plain.text == answer.text
    print(f"plainly: {plain.tokens_per_second:.0f} tok/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
