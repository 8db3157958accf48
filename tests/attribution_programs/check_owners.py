"""Compare the owners of the races in a JSON report with the names of the functions that have them."""

import json
import sys

races = json.load(open(sys.argv[1]))["races"]
programs = [name for name in sys.argv[2].split(",") if name]
owners: dict[str, list[tuple[str, int]]] = {name: [] for name in programs}
unknown = []
for race in races:
    names = {
        name
        for side in (race["current"], race["previous"])
        for frame in side["stack"]
        for name in programs
        if name in frame["name"].split(".")
    }
    if not names:
        unknown.append(race)
    for name in names:
        owners[name].append((race["owner"], race["count"], race["sentence"]))
mistakes = 0
for name, found in owners.items():
    expected = name.partition("_")[0]
    is_right = bool(found) and {owner for owner, *_ in found} == {expected}
    if name == "program_callback_in_library":  # the library's own race is there, too
        is_right = "program" in {owner for owner, *_ in found}
    mistakes += not is_right
    print("ok   " if is_right else "WRONG", name, [f"{o} x{c}" for o, c, _ in found])
    if not is_right:
        for o, c, s in found:
            print("        ", o, c, s)
for race in unknown:
    print(
        "UNKNOWN",
        race["owner"],
        race["sentence"],
        [f["name"] for f in race["current"]["stack"]][:6],
    )
print(f"{len(owners) - mistakes} of {len(owners)} right, {len(unknown)} races elsewhere")
