// Draws solutions from the data blocks of this file.  Text becomes text nodes, never markup.
"use strict";
const MATHML = "http://www.w3.org/1998/Math/MathML";
const index = JSON.parse(document.getElementById("index").textContent);
const $ = (id) => document.getElementById(id);
const state = { order: [], at: 0, drawn: 0 };

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

function mathml([tag, attributes, ...children]) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (typeof child === "string" ? child : mathml(child))));
  return node;
}

// Language models write Markdown: **words** are bold.  Powers such as 2**3 and (x+1)**(n) are not.
const BOLD = /(?<![\p{L}\p{N}_*)\]}])\*\*(?=\S)([^*\n]+?)(?<=\S)\*\*(?![\p{L}\p{N}_*([{])/u;
function emphasized(text) {
  return text.split(BOLD).map((part, i) => (i % 2 ? element("b", {}, part) : part));
}

function typeset(pieces) {
  const nodes = [];
  for (let piece of pieces) {
    // whether the last node is a formula on its own line
    const line = nodes.at(-1)?.firstChild?.getAttribute?.("display") === "block";
    if (line && typeof piece === "string") piece = piece.trimStart();
    if (typeof piece !== "string") {
      const tree = mathml(piece.m);
      if (piece.d) tree.setAttribute("display", "block");
      nodes.push(element("span", { className: "formula" }, tree));
    } else if (nodes.at(-1)?.className === "formula" && /^[.,;:!?)]/.test(piece)) {
      nodes.at(-1).append(piece[0]); // no line may begin with the full stop after a formula
      nodes.push(...emphasized(line ? piece.slice(1).trimStart() : piece.slice(1)));
    } else nodes.push(...emphasized(piece));
  }
  return nodes;
}

// A page is gzip in base64; the last few opened pages are kept.
const opened = new Map();
async function page(number) {
  if (!opened.has(number)) {
    const bytes = Uint8Array.from(atob($(`page-${number}`).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    opened.set(number, new Response(stream).json());
    if (opened.size > 8) opened.delete(opened.keys().next().value);
  }
  return opened.get(number);
}

const nearlySure = (p) => (p > 0 && p < 0.005) || (p > 0.995 && p < 1);
const percent = (p) => `${(100 * p).toFixed(nearlySure(p) ? 1 : 0)} %`;
const NAMES = { "-1": "wrong", 0: "neutral", 1: "right" };

// Returns a sentence about the steps that the model doubts.
function verdict(solution) {
  const p = solution.steps.map((step) => step.p);
  if (!p.length || p[0] === null) return "";
  const first = p.findIndex((value) => value < index.threshold);
  const least = p.indexOf(Math.min(...p));
  const text =
    first < 0
      ? `No step is doubted; the least sure is step ${least + 1} (${percent(p[least])}).`
      : `First doubted step: ${first + 1} of ${p.length} (${percent(p[first])} right).`;
  const labels = solution.steps.map((step) => step.label);
  if (labels.every((label) => label === undefined)) return text;
  const wrong = labels.indexOf(-1);
  if (wrong < 0) return `${text} By its labels no step is wrong.`;
  const same = wrong === first ? ", as the model says" : "";
  return `${text} By its labels step ${wrong + 1} is the first wrong one${same}.`;
}

function drawStep(step, number, of) {
  // The colour is deepest as far below the threshold as `sure` is above it.
  const range = Math.max(2 * (index.sure - index.threshold), 1e-6);
  const doubt = step.p === null ? 0 : Math.min(Math.max((index.sure - step.p) / range, 0), 1);
  const item = element("li", { className: "step" });
  item.style.setProperty("--doubt", doubt.toFixed(3));
  const meta = element("div", { className: "meta" }, element("b", {}, `${number}`));
  if (step.p !== null) {
    const bar = element("span", { className: "bar" }, element("i"));
    bar.firstChild.style.width = `${100 * step.p}%`;
    meta.append(bar, element("span", { className: "p" }, percent(step.p)));
  }
  if (step.std !== undefined) meta.append(element("span", {}, `± ${step.std.toFixed(2)}`));
  if (step.label !== undefined) {
    meta.append(element("span", { className: `label l${step.label}` }, `labelled ${NAMES[step.label]}`));
    const missed = step.label < 0 && step.p >= index.threshold;
    const alarm = step.label > 0 && step.p !== null && step.p < index.threshold;
    const sure = (missed && step.p > index.sure) || (alarm && step.p < index.threshold / 2);
    if (sure) item.classList.add("mistaken");
    const sureOf = `model sure it is ${missed ? "right" : "wrong"}`;
    const told = sure ? sureOf : missed ? "missed" : alarm ? "doubted, but right" : "";
    if (told) meta.append(element("strong", { className: "alarm" }, told));
  }
  const bare = of === 1 && meta.children.length === 1; // a single step needs no number
  const text = element("div", { className: "text" }, ...typeset(step.text));
  item.append(...(bare ? [text] : [meta, text]));
  return item;
}

function drawSolution(solution) {
  const right = { true: "✓ right", false: "✗ wrong", null: "? not graded" }[solution.correct];
  const scores = index.scores
    .filter((name) => solution.scores[name] !== undefined)
    .map((name) => `${name} ${solution.scores[name].toPrecision(3)}`);
  const said = verdict(solution);
  const steps = solution.steps.map((step, i) => drawStep(step, i + 1, solution.steps.length));
  const doubted = solution.steps.findIndex((step) => step.p !== null && step.p < index.threshold);
  if (doubted >= 0) steps[doubted].classList.add("first");
  return element(
    "article",
    { tabIndex: -1 },
    element(
      "h3",
      { className: String(solution.correct) },
      `${right}${solution.missing ? " (no answer)" : ""}`,
      solution.answer ? element("span", { className: "answer" }, ...typeset(solution.answer)) : "",
    ),
    element("p", { className: "soft" }, [...solution.why, ...scores].join(" · ")),
    said && element("p", { className: "verdict" }, said),
    element("ol", {}, ...steps),
  );
}

async function draw() {
  const turn = ++state.drawn;
  $("found").textContent = state.order.length
    ? `${state.at + 1} of ${state.order.length} problems`
    : "no problem";
  $("problem").replaceChildren();
  $("solutions").replaceChildren();
  if (!state.order.length) return;
  const number = state.order[state.at];
  const problems = await page(Math.floor(number / index.size));
  if (turn !== state.drawn) return; // the user has asked for another problem meanwhile
  const problem = problems[number % index.size];
  const about = [problem.level, problem.subject].filter(Boolean);
  const truth = problem.truth;
  $("problem").append(
    element("h2", {}, ...typeset(problem.text)),
    element("p", { className: "soft" }, about.join(" · "), about.length && truth.length ? " · " : "",
      truth.length ? "Right answer: " : "", ...typeset(truth)),
  );
  const by = $("sort").value;
  const solutions = [...problem.solutions];
  if (by !== "file") {
    const score = (solution) => solution.scores[by] ?? -Infinity;
    solutions.sort((a, b) => score(b) - score(a));
  }
  $("solutions").append(...solutions.map(drawSolution));
  $("solutions").scrollTo(0, 0);
  fade({ target: $("solutions") });
  history.replaceState(null, "", `#${number + 1}`);
}

// Bits of a problem's flags, which _flags in __init__.py sets.
const KINDS = { all: 0, right: 1, wrong: 2, best_wrong: 4, worst_right: 8 };
function filter(keep) {
  const bit = KINDS[$("kind").value];
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const current = keep ?? state.order[state.at];
  state.order = [];
  index.problems.forEach(([flags, text], number) => {
    if ((flags & bit) === bit && words.every((word) => text.includes(word))) state.order.push(number);
  });
  state.at = Math.max(state.order.indexOf(current), 0);
  draw();
}

function move(by) {
  const at = Math.min(Math.max(state.at + by, 0), state.order.length - 1);
  if (at !== state.at && at >= 0) {
    state.at = at;
    draw();
  }
}

function along(by) {
  const articles = [...$("solutions").children];
  const at = articles.indexOf(document.activeElement.closest("article"));
  const next = articles[Math.min(Math.max(at + by, 0), articles.length - 1)];
  next?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "nearest", inline: "start" });
}

// Fades the right edge of an element that can be scrolled further.
function fade({ target }) {
  target.classList.toggle("more", target.scrollWidth - target.clientWidth - target.scrollLeft > 4);
}
const resized = new ResizeObserver((entries) => entries.forEach(fade));
for (const node of [$("solutions"), ...document.querySelectorAll(".scroll")]) {
  node.addEventListener("scroll", fade);
  resized.observe(node);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const keys = { j: () => move(1), k: () => move(-1), ArrowRight: () => along(1), ArrowLeft: () => along(-1) };
  keys["/"] = () => $("search").focus();
  for (let i = 1; i <= $("kind").length; i++) {
    keys[i] = () => { $("kind").selectedIndex = i - 1; filter(); };
  }
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

if (index.problems.length) {
  for (const name of ["file", ...index.scores]) {
    $("sort").append(element("option", { value: name }, name === "file" ? "as in the file" : name));
  }
  $("sort").value = index.scores[0] ?? "file";
  for (const id of ["kind", "sort"]) $(id).addEventListener("change", () => filter());
  $("search").addEventListener("input", () => filter());
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("next").addEventListener("click", () => move(1));
  $("previous").addEventListener("click", () => move(-1));
  $("viewer").hidden = false;
  filter((parseInt(location.hash.slice(1), 10) || 1) - 1);
}
