"""The page in a headless Chromium: type, stream, stop, race, tree, keyboard, phone, key.

Needs the extra ``browser`` and a Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="pip install 'secondguess[browser]'")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from secondguess import LLM, SamplingParams, TreeConfig
from test_server import app_with
from test_server_faults import listening
from tiny_folder import save_tiny

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 780}
SIZES = {"desktop": {"width": 1280, "height": 760}, "phone": PHONE}
SETTINGS = {"max-tokens": "40", "temperature": "1", "seed": "7"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no Chromium starts (install one: playwright install chromium): {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    tree, others = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3), ("ar", "ngram", "eagle3.1")
    return LLM(folder / "target", folder / "drafters" / "pr", others=others, tree=tree, max_batch_size=2)


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with listening(app_with(llm)) as url:
        yield url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    yield from opened(browser, url)


def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page that is ready. Nothing that it logs, asks of others or fails at passes."""
    page, troubles = browser.new_page(**options), []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda m: troubles.append(m.text) if "Content Security Policy" in m.text else None)
    page.on("request", lambda request: None if request.url.startswith(url) else troubles.append(request.url))
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    yield page
    page.close()
    assert troubles == []


def settle(page: Page, **fields: str) -> None:
    page.get_by_text("Settings").click()
    for name, value in (SETTINGS | fields).items():
        page.locator(f"#{name}").fill(value)
    page.get_by_text("Settings").click()


def ask(page: Page, text: str = "hello") -> None:
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")


def ended(page: Page) -> None:
    expect(page.locator("#send")).to_be_visible(timeout=30_000)


@pytest.fixture
def slowly(llm: LLM, monkeypatch) -> None:
    """A cycle takes long enough for a reader to do something meanwhile."""
    step = llm._pump.step
    monkeypatch.setattr(llm._pump, "step", lambda: (time.sleep(0.02), step()))


def test_a_question_is_answered_as_it_comes(page: Page, llm: LLM) -> None:
    settle(page)
    ask(page)
    ended(page)
    answer = page.locator(".assistant .text")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7)
    assert answer.text_content() == llm.generate("hello\n", params)[0].text  # as the chat template has it
    kinds = {span.get_attribute("class") for span in answer.locator("span").all()}
    assert "model" in kinds
    assert kinds <= {"model", "level0", "refined"}
    note = page.locator(".assistant small").text_content() or ""
    assert re.match(r"PR: \d+ tokens, \d+\.\d\d per cycle, \d+\.\d per second", note), note
    assert page.locator("#question").input_value() == ""
    ask(page, "and then")
    ended(page)
    assert page.locator(".assistant").count() == 2


def test_text_from_the_model_is_never_markup(page: Page) -> None:
    ask(page, "<img src=x onerror=alert(1)>")
    ended(page)
    assert page.locator("#log img").count() == 0
    assert page.locator(".user").text_content() == "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_can_be_stopped(page: Page, llm: LLM, slowly: None, how: str) -> None:
    settle(page, **{"max-tokens": "900", "temperature": "0"})
    ask(page)
    page.wait_for_selector(".assistant span")
    page.locator("#stop").click() if how == "button" else page.keyboard.press("Escape")
    ended(page)
    note = page.locator(".assistant small").text_content() or ""
    assert "stopped" in note
    assert 0 < int(re.findall(r"(\d+) tokens", note)[0]) < 900
    page.wait_for_timeout(300)
    assert llm.load.num_running == 0


def test_a_refused_question_is_kept(page: Page) -> None:
    settle(page, temperature="-1")
    ask(page, "hello")
    ended(page)
    assert "temperature" in (page.locator(".assistant .error").text_content() or "")
    assert page.locator("#question").input_value() == "hello"


def test_new_chat_forgets(page: Page) -> None:
    ask(page)
    ended(page)
    page.locator("#reset").click()
    assert page.locator(".assistant").count() == 0


def test_trees_can_be_paused_and_stepped_through(page: Page) -> None:
    settle(page)
    ask(page)
    ended(page)
    which, drawing = page.locator("#which"), page.locator("#drawing svg")
    count = int(re.findall(r"of (\d+)", which.text_content() or "")[0])
    assert which.text_content() == f"cycle {count} of {count}"
    assert drawing.locator(".node").count() == 1 + 12 + 1  # root, guesses and bonus token
    page.locator("#log").press("ArrowLeft")
    assert which.text_content() == f"cycle {count - 1} of {count}"
    page.locator("#back").click()
    assert which.text_content() == f"cycle {count - 2} of {count}"
    page.locator("#cycle").fill("1")
    assert which.text_content() == f"cycle 1 of {count}"
    page.locator("#log").press("ArrowLeft")
    assert which.text_content() == f"cycle 1 of {count}"
    page.locator("#log").press("p")
    assert page.locator("#pause").text_content() == "Pause"
    # Which of the cycles behind is seen, chance says.
    expect(which).not_to_have_text(re.compile(r"^cycle [12] of"), timeout=5000)
    page.locator("#pause").click()
    assert page.locator("#pause").text_content() == "Play"
    assert "12 guesses after " in (page.locator("#said").text_content() or "")
    assert float(page.locator("#tau").text_content() or 0) >= 1
    assert float(page.locator("#pace").text_content() or 0) > 0


def test_an_answer_of_one_cycle_has_nothing_to_play(page: Page) -> None:
    settle(page, **{"max-tokens": "2", "budget": "1"})
    ask(page)
    ended(page)
    which = page.locator("#which")
    assert which.text_content() == "cycle 1 of 1"
    page.locator("#pause").click()
    page.wait_for_timeout(600)
    assert which.text_content() == "cycle 1 of 1"
    assert page.locator("#pause").text_content() == "Play"


def test_arrow_keys_scroll_a_drawing_that_has_the_focus(page: Page) -> None:
    settle(page)
    ask(page)
    ended(page)
    place = page.locator("#which").text_content()
    page.evaluate("document.getElementById('drawing').firstChild.style.minWidth = '5000px'")
    page.locator("#drawing").press("ArrowLeft")
    assert page.locator("#which").text_content() == place
    page.locator("#drawing").press("ArrowRight")
    page.wait_for_timeout(300)
    assert page.evaluate("document.getElementById('drawing').scrollLeft") > 0


def test_one_answer_or_race_at_a_time(page: Page, llm: LLM, slowly: None) -> None:
    settle(page, **{"max-tokens": "900", "temperature": "0"})
    ask(page)
    page.wait_for_selector(".assistant span")
    page.locator("nav [data-view=race]").click()
    expect(page.locator("#go")).to_be_disabled()
    page.locator("#prompt").press("Enter")
    page.wait_for_timeout(200)
    assert page.locator("#lanes article").count() == 0
    page.keyboard.press("Escape")
    expect(page.locator("#go")).to_be_enabled()
    page.locator("#go").click()
    page.wait_for_selector("#lanes span")
    page.locator("nav [data-view=chat]").click()
    expect(page.locator("#send")).to_be_disabled()
    ask(page, "and now")
    assert page.locator(".user").count() == 1
    assert page.locator("#question").input_value() == "and now"
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled()


def test_an_empty_temperature_is_what_the_field_says(page: Page) -> None:
    settle(page, temperature="")
    assert page.locator("#temperature").get_attribute("placeholder") == "1"
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page)
    assert (request.value.post_data_json or {})["temperature"] == 1
    ended(page)


def test_accepted_nodes_are_those_of_the_path(page: Page) -> None:
    """Cases that a tiny model may not come to."""
    drawn = page.evaluate(
        """async () => {
            const { draw, layout } = await import("/page/tree.js");
            const cycle = {
                tokens: ["a", " b", "c", "\\n", "abcdefghij"], parents: [-1, 0, 0, 2, 1], levels: [0, 0, 1, 0, 1],
                probabilities: [null, 0.25, 0.5, 1, 0.125], path: [0, 2], bonus: "z",
            };
            const none = cycle.tokens.map(() => null);
            const nodes = [...draw(cycle, "pr", "label").querySelectorAll(".node")];
            return {
                layout: layout(cycle), classes: nodes.map((node) => node.getAttribute("class")),
                texts: nodes.map((node) => node.querySelector("text").textContent),
                titles: nodes.map((node) => node.querySelector("title").textContent),
                lookup: draw({ ...cycle, probabilities: none }, "ngram", "").querySelector(".lookup") !== null,
            };
        }"""
    )
    places = [(place["x"], place["y"]) for place in drawn["layout"]["places"]]
    assert places == [(0, 0), (1, 2), (1, 0), (2, 0), (2, 2)], "the likelier sibling goes first"
    assert (drawn["layout"]["bonus"], drawn["layout"]["columns"], drawn["layout"]["rows"]) == ({"x": 2, "y": 1}, 3, 3)
    assert drawn["classes"] == [
        "node model accepted",
        "node level0",
        "node refined accepted",
        "node level0",
        "node refined",
        "node model accepted",
    ]
    assert drawn["texts"] == ["a", "\u00b7b", "c", "\u21b5", "abcdefg\u2026", "z"]
    assert drawn["titles"][2] == '"c", refined, 50% after its parent, accepted'
    assert drawn["lookup"]


def test_a_race_of_three(page: Page) -> None:
    settle(page)
    page.locator("nav [data-view=race]").click()
    page.locator("#prompt").fill("hello")
    page.locator("#go").click()
    expect(page.locator("#replay")).to_be_enabled(timeout=60_000)
    lanes = page.locator("#lanes article")
    assert [lane.locator("h2").text_content() for lane in lanes.all()] == ["plain decoding", "EAGLE-3.1", "PR"]
    texts = {lane.locator(".text").text_content() for lane in lanes.all()}
    assert len(texts) == 1
    assert len(texts.pop() or "") > 0
    for lane in lanes.all()[1:]:
        assert re.search(r"\d\.\d\dx, the same text", lane.locator("p").text_content() or "")
    page.locator("#replay").click()
    expect(page.locator("#replay")).to_be_enabled(timeout=60_000)
    assert len({lane.locator(".text").text_content() for lane in lanes.all()}) == 1


def test_a_race_can_be_stopped(page: Page, slowly: None) -> None:
    settle(page, **{"max-tokens": "900", "temperature": "0"})
    page.locator("nav [data-view=race]").click()
    page.locator("#go").click()
    page.wait_for_selector("#lanes span")
    page.keyboard.press("Escape")
    expect(page.locator("#go")).to_be_visible()
    assert page.locator("#lanes p").last.text_content() == "waiting"


def test_a_phone_shows_one_part_at_a_time(browser: Browser, url: str) -> None:
    for page in opened(browser, url, viewport=PHONE):
        ask(page)
        ended(page)
        for view, part in (("race", "#race"), ("tree", "#tree"), ("chat", "#chat")):
            page.locator(f"nav [data-view={view}]").click()
            shown = [name for name in ("#chat", "#race", "#tree") if page.locator(name).is_visible()]
            assert shown == [part]
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing sticks out"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_light_and_dark_on_every_screen(browser: Browser, url: str, scheme: Any, size: str) -> None:
    """SCREENSHOTS=FOLDER keeps pictures of them; SERVER=URL of another server's, with text worth looking at."""
    address, width = os.environ.get("SERVER", url), SIZES[size]["width"]
    for page in opened(browser, address, viewport=SIZES[size], color_scheme=scheme):
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
        settle(page, **{"max-tokens": "60", "temperature": "0"})
        ask(page, "Why is the sky blue?")
        ended(page)
        page.locator("#cycle").evaluate("slider => { slider.value = 24; slider.dispatchEvent(new Event('input')); }")
        for view in ("chat", "tree", "race") if size == "phone" else ("chat", "race"):
            page.locator(f"nav [data-view={view}]").click()
            if view == "race":
                page.locator("#prompt").fill("Why is the sky blue?")
                page.locator("#go").click()
                expect(page.locator("#replay")).to_be_enabled(timeout=120_000)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            if folder := os.environ.get("SCREENSHOTS"):
                page.screenshot(path=Path(folder) / f"{view}-{size}-{scheme}.png")


def test_a_key_is_asked_for(browser: Browser, llm: LLM) -> None:
    with listening(app_with(llm, api_key="secret")) as url:
        page = browser.new_page()
        page.goto(url)
        for key in ("wrong", "secret"):
            page.locator("#key").fill(key)
            page.locator("dialog button").click()
        page.wait_for_selector("body[data-ready]")
        ask(page)
        ended(page)
        assert page.locator(".assistant span").count() > 0
        page.close()
