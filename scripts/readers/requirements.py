"""Prints what a wheel requires here, without its extras and without the packages named.

Usage: requirements.py WHEEL [NAME ...]
"""
import email
import sys
import zipfile

from pip._vendor.packaging.requirements import Requirement

wheel, *without = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
for line in lines:
    requirement = Requirement(line)
    fits = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if fits and requirement.name.lower() not in without:
        requirement.marker = None
        print(requirement)
