"""A draft written as an engine reads it, and checked without that engine.

    python export_verify.py runs/mine exports/mine hf
"""

import sys

import longdraft


def main(run, output, engine):
    draft = longdraft.Draft.open(run)
    for folder in longdraft.export(draft, engine, output):
        print(f"{folder.output}: {folder.tensors} tensors")
        for name, command in folder.serve.items():
            print(f"  {name}: {command}")
    reports = longdraft.verify(output, target=draft.target, checkpoint=run)
    for report in reports:
        print(f"{report.folder}: {'clean' if report else 'may not be served'}")
        for problem in report.problems:
            print(f"  {problem}\n    {problem.remedy}")
    if not all(reports):
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
