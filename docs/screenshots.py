"""Pictures of the page for docs/page.md.

  python docs/screenshots.py --page=page.html --problem=3 --output=docs/images

Needs playwright and an installed Chromium (extra `test`).
"""

import dataclasses
import pathlib
import shutil

from playwright import sync_api

from prm_jax.runtime import command_line, exits

SHOTS = {  # name: width, height, colour scheme
  "page_light": (1400, 900, "light"),
  "page_dark": (1400, 900, "dark"),
  "page_narrow": (400, 900, "light"),
}


@dataclasses.dataclass(frozen=True)
class Args:
  page: pathlib.Path  # of view.py or rerank.py
  output: pathlib.Path = pathlib.Path("docs/images")
  problem: int = 1  # that is shown


def main() -> None:
  args = command_line.parse(Args, __doc__)
  args.output.mkdir(parents=True, exist_ok=True)
  browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
  with sync_api.sync_playwright() as driver:
    chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
    for name, (width, height, scheme) in SHOTS.items():
      viewport = {"width": width, "height": height}
      tab = chromium.new_page(viewport=viewport, color_scheme=scheme)
      tab.goto(f"{args.page.resolve().as_uri()}#{args.problem}")
      tab.wait_for_selector("article")
      tab.screenshot(path=args.output / f"{name}.png")
      print(args.output / f"{name}.png")


if __name__ == "__main__":
  exits.run(main)
