"use strict";
// Names the values under the pointer, and enlarges charts. The page is whole without it.
function readable(value, share) {
  if (share) return (100 * value).toFixed(1) + " %";
  const size = Math.abs(value);
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return Number((value / (suffix === "k" ? 1e3 : unit)).toPrecision(4)) + suffix;
  }
  return size !== 0 && size < 1e-2 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// A point is its height, then its place on every axis.
function nearest(points, axis, x) {
  let best = points[0];
  for (const point of points) {
    if (Math.abs(point[axis] - x) < Math.abs(best[axis] - x)) best = point;
  }
  return best;
}

function watch(figure) {
  const svg = figure.querySelector("svg");
  const { frame, x: axes, y, log, share, xCounts, curves } = JSON.parse(figure.dataset.values);
  const [left, top, right, bottom] = frame;
  const toY = (value) => bottom - ((log ? Math.log10(value) : value) - y[0]) / (y[1] - y[0]) * (bottom - top);
  const marks = document.createElementNS(svg.namespaceURI, "g");
  svg.append(marks);
  let tip = null;

  function leave() {
    marks.replaceChildren();
    if (tip) tip.remove();
    tip = null;
  }

  function draw(name, attributes) {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    marks.append(made);
  }

  function move(event) {
    const chosen = document.querySelector("[name=axis]:checked");
    const index = Math.max(0, axes.findIndex(({ name }) => chosen && chosen.id === "by-" + name));
    const { title, range: x } = axes[index];
    const axis = index + 1;
    const toX = (value) => left + (value - x[0]) / (x[1] - x[0]) * (right - left);
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const at = x[0] + ((event.clientX - box.left) * scale - left) / (right - left) * (x[1] - x[0]);
    if (curves.length === 0 || at < x[0] || at > x[1]) return leave();
    const found = curves.map((curve) => ({ curve, point: nearest(curve.points, axis, at) }));
    const away = (entry) => Math.abs(entry.point[axis] - at);
    const closest = found.reduce((a, b) => (away(b) < away(a) ? b : a)).point[axis];
    // A curve that has nothing near the pointer is left out.
    const near = found.filter(({ point }) => Math.abs(point[axis] - closest) <= 0.04 * (x[1] - x[0]));
    marks.replaceChildren();
    draw("line", { class: "cursor", x1: toX(closest), x2: toX(closest), y1: top, y2: bottom });
    for (const { curve, point } of near) {
      draw("circle", { class: "spot", cx: toX(point[axis]), cy: toY(point[0]), r: 11, fill: curve.ink });
    }
    if (!tip) figure.append(tip = element("div", "tip"));
    const place = xCounts ? `${title} ${closest}` : `${readable(closest, false)} ${title}`;
    tip.replaceChildren(element("div", "", place));
    for (const { curve, point } of near) {
      const line = element("div");
      const dot = element("i");
      dot.style.background = curve.ink;
      line.append(dot, element("span", "", curve.label), element("b", "", readable(point[0], share)));
      tip.append(line);
    }
    const around = figure.getBoundingClientRect();
    const beside = event.clientX - around.left + 16;
    const fits = beside + tip.offsetWidth < around.width;
    tip.style.left = Math.max(4, fits ? beside : beside - tip.offsetWidth - 32) + "px";
    tip.style.top = Math.max(4, event.clientY - around.top - tip.offsetHeight - 8) + "px";
  }

  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
  document.querySelectorAll("[name=axis]").forEach((input) => input.addEventListener("change", leave));
  const button = figure.querySelector("button");
  button.hidden = false;
  button.addEventListener("click", () => {
    const isWide = figure.classList.toggle("wide");
    button.textContent = isWide ? "smaller" : "larger";
  });
}

const watchAll = () => document.querySelectorAll("figure[data-values]").forEach(watch);
watchAll();

// A page of a run that goes on asks what it has become, and keeps what its reader opened and chose.
function follow() {
  const pause = 2000;
  const name = (part) => part.textContent.trim();
  let tag = null;
  let failures = 0;

  // Nothing moves under a reader's pointer or selection.
  const isBusy = () => document.hidden || document.querySelector(".tip") || !getSelection().isCollapsed;

  function take(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    fresh.querySelectorAll("script").forEach((script) => script.remove());
    const open = new Map([...document.querySelectorAll("details")].map((part) => [name(part.firstElementChild), part.open]));
    const wide = new Set([...document.querySelectorAll("figure.wide figcaption span")].map(name));
    const chosen = document.querySelector("[name=axis]:checked");
    const at = [scrollX, scrollY];
    document.title = fresh.title;
    document.body.replaceChildren(...fresh.body.childNodes);
    for (const part of document.querySelectorAll("details")) {
      const was = open.get(name(part.firstElementChild));
      if (was !== undefined) part.open = was;
    }
    const input = chosen && document.getElementById(chosen.id);
    if (input) input.checked = true;
    watchAll();
    for (const caption of document.querySelectorAll("figcaption span")) {
      if (wide.has(name(caption))) caption.parentElement.querySelector("button").click();
    }
    scrollTo(...at);
  }

  function tell(text) {
    let line = document.querySelector(".gone");
    if (!text) return line && line.remove();
    if (!line) document.body.append(line = element("p", "gone"));
    line.textContent = text;
  }

  async function look() {
    try {
      if (!isBusy()) {
        const answer = await fetch(location.pathname, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag");
          take(await answer.text());
        }
        failures = 0;
        tell("");
      }
    } catch {
      failures += 1;
      if (failures > 2) tell("Nobody serves this page any more: it stands as it was last.");
    }
    setTimeout(look, pause);
  }
  setTimeout(look, pause);
}

if ("live" in document.body.dataset && location.protocol.startsWith("http")) follow();
