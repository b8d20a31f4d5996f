"""The same prompt through assisted generation of transformers and through longdraft.

    python beside_transformers.py path/to/model "Once upon a time" runs/mine path/to/assistant

The model is a Hugging Face folder or a GGUF file. Without an assistant, transformers looks up what stood earlier in the text, as longdraft does without
a draft. Needs `pip install torch transformers` (and `gguf` for a GGUF file).
"""

import pathlib
import sys
import time

import longdraft

TOKENS = 64


def opened(loader, name, **options):
    """A model or tokenizer of transformers: of a folder, or of a GGUF file in it."""
    path = pathlib.Path(name)
    if path.suffix == ".gguf":
        return loader.from_pretrained(str(path.parent), gguf_file=path.name, **options)
    return loader.from_pretrained(name, **options)


def with_transformers(name, prompt, assistant):
    """How, tokens, seconds and text of each answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = opened(AutoTokenizer, name)
    model = opened(AutoModelForCausalLM, name, dtype=torch.float32).eval()
    helper = {"prompt_lookup_num_tokens": 4}
    if assistant:
        helper = {"assistant_model": opened(AutoModelForCausalLM, assistant, dtype=torch.float32).eval()}
    inputs = tokenizer(prompt, return_tensors="pt")
    for how, more in (("plainly", {}), ("assisted", helper)):
        begun = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **more)[0]
        new = ids[inputs["input_ids"].shape[1] :]
        yield how, len(new), time.perf_counter() - begun, tokenizer.decode(new, skip_special_tokens=True)


def with_longdraft(name, prompt, draft):
    """The same."""
    target = longdraft.Target.open(name, dtype="f32")
    drafted = longdraft.Session(target, draft, lookup=None if draft else "merge")
    for how, session in (("plainly", longdraft.Session(target)), ("drafted", drafted)):
        session.generate(prompt, max_tokens=1)  # reads the draft and wakes the threads
        begun = time.perf_counter()
        answer = session.generate(prompt, max_tokens=TOKENS)
        yield how, len(answer.tokens), time.perf_counter() - begun, answer.text


def show(program, answers):
    """Prints what each answer took, and whether both are one text."""
    texts = []
    for how, tokens, seconds, text in answers:
        print(f"{program}, {how}: {tokens} tokens in {seconds:.2f} s", flush=True)
        texts.append(text)
    print(f"{program}: {'the same text' if texts[0] == texts[1] else 'two different texts'}")


def main(name, prompt, draft=None, assistant=None):
    show("longdraft", with_longdraft(name, prompt, draft))
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped transformers: {error.name} is not installed (pip install torch transformers)")
        return
    show("transformers", with_transformers(name, prompt, assistant))


if __name__ == "__main__":
    main(*sys.argv[1:])
