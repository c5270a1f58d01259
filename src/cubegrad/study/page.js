"use strict";
// Draws the charts of a report from the JSON inside each .charts element. Text from records is
// only ever set as text.

const SIZE = { height: 280, top: 8, bottom: 40, right: 14 };

function make(parent, name, attributes = {}, text = "") {
  const svg = parent.namespaceURI.endsWith("svg") || name === "svg";
  const space = svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

const label = (value) => String(Number(value.toPrecision(6)));

/** The y values that the chart must show, of the series that are on. */
function mustShow(chart, series) {
  const points = series.flatMap((one) => one.points ?? []);
  let values = points.map((point) => point[1]);
  if (chart.cut) { // the better three quarters of all points, and two of every curve
    const better = (list) => list.sort((a, b) => chart.better * (b - a));
    values = better(values).slice(0, values.length - Math.floor(values.length / 4));
    for (const one of series) values.push(...better((one.points ?? []).map((p) => p[1])).slice(0, 2));
  } else {
    values = [];
    for (const { points = [] } of series) {
      const late = points.slice(Math.floor(points.length * (chart.skip ?? 0)));
      values.push(...late.map((point) => point[1]));
      const last = points[points.length - 1];
      if (last) values.push(...band(last, chart.log));
    }
  }
  return values.concat(series.filter((one) => "level" in one).map((one) => one.level));
}

/** The ends of mean ± error; on a logarithmic axis the lower end stays above 0. */
function band([, mean, error], log) {
  return [log ? Math.max(mean - error, mean / 10) : mean - error, mean + error];
}

/** A map from values to [0, 1] with its ticks. */
function axis(values, log, margin, whole = false) {
  const to = log ? Math.log10 : Number;
  let low = Math.min(...values.map(to)), high = Math.max(...values.map(to));
  if (!values.length) [low, high] = [0, 1];
  const pad = margin * (high - low) || 0.1 * Math.abs(high) || 0.5;
  [low, high] = margin || low === high ? [low - pad, high + pad] : [low, high];
  const place = (value) => (to(value) - low) / (high - low);
  const ticks = log ? logTicks(low, high) : linearTicks(low, high, whole);
  return { place, ticks: ticks.filter((tick) => place(tick) > -1e-9 && place(tick) < 1 + 1e-9) };
}

function linearTicks(low, high, whole, count = 6) {
  const rough = (high - low) / count, ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * [1, 2, 5, 10].find((factor) => factor * ten >= rough * 0.999);
  const size = whole ? Math.max(1, Math.round(step)) : step;
  const first = Math.ceil(low / size - 1e-9);
  const length = Math.max(0, Math.min(20, Math.floor(high / size + 1e-9) - first + 1));
  return Array.from({ length }, (_, i) => (first + i) * size);
}

function logTicks(low, high) {
  const decades = high - low;
  const every = Math.ceil(decades / 7), factors = decades < 2.5 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1)
    if (power % every === 0) ticks.push(...factors.map((factor) => Number(`${factor}e${power}`)));
  const within = ticks.filter((tick) => tick >= 10 ** low && tick <= 10 ** high);
  return within.length < 3 ? linearTicks(10 ** low, 10 ** high, false) : within;
}

/** Draw a chart at the width it has now; returns what the cursor needs. */
function draw(chart, svg, series, styles) {
  svg.replaceChildren();
  const width = Math.max(svg.parentNode.clientWidth, 240);
  const xs = chart.series.flatMap((one) => [...(one.points ?? []).map((p) => p[0]), ...(one.lost ?? [])]);
  const x = axis(xs, chart.logx, chart.logx ? 0.04 : 0, !chart.logx);
  const y = axis(mustShow(chart, series), chart.log, 0.08);
  const left = 14 + 7 * Math.max(2, ...y.ticks.map((tick) => label(tick).length));
  const inner = { width: width - left - SIZE.right, height: SIZE.height - SIZE.top - SIZE.bottom };
  const px = (value) => left + inner.width * x.place(value);
  const py = (value) => SIZE.top + inner.height * (1 - y.place(value));
  svg.setAttribute("viewBox", `0 0 ${width} ${SIZE.height}`);
  const bottom = SIZE.top + inner.height, right = left + inner.width;
  for (const tick of y.ticks) {
    make(svg, "line", { class: "rule", x1: left, x2: right, y1: py(tick), y2: py(tick) });
    make(svg, "text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, label(tick));
  }
  let taken = -Infinity;
  for (const tick of x.ticks) {
    const half = label(tick).length * 3.5 + 4;
    if (px(tick) - half < taken) continue;
    taken = px(tick) + half;
    make(svg, "text", { x: px(tick), y: bottom + 17, "text-anchor": "middle" }, label(tick));
  }
  make(svg, "text", { x: left + inner.width / 2, y: bottom + 35, "text-anchor": "middle" }, chart.x);
  make(svg, "line", { class: "rule", x1: left, x2: right, y1: bottom, y2: bottom });
  const frame = make(svg, "svg", { x: left, y: SIZE.top, width: inner.width, height: inner.height });
  frame.setAttribute("viewBox", `${left} ${SIZE.top} ${inner.width} ${inner.height}`);
  for (const one of series) drawSeries(frame, one, chart, { px, py, left, right, bottom }, styles);
  const cursor = make(svg, "line", { class: "cursor", y1: SIZE.top, y2: bottom, visibility: "hidden" });
  return { px, cursor, width, xs: [...new Set(xs)].sort((a, b) => a - b) };
}

function drawSeries(frame, one, chart, { px, py, left, right, bottom }, styles) {
  const index = styles[one.id], line = { class: `curve s${index} d${index}`, "data-id": one.id };
  if ("level" in one) {
    make(frame, "path", { ...line, d: `M${left},${py(one.level)}H${right}` });
    return;
  }
  const at = (point, value) => `${px(point[0]).toFixed(1)},${py(value).toFixed(1)}`;
  if (one.points.some((point) => point[2])) {
    const high = one.points.map((point) => at(point, band(point, chart.log)[1]));
    const low = one.points.map((point) => at(point, band(point, chart.log)[0])).reverse();
    make(frame, "path", { class: `band s${index}`, d: `M${high.concat(low).join("L")}Z` });
  }
  if (one.points.length > 1)
    make(frame, "path", { ...line, d: `M${one.points.map((p) => at(p, p[1])).join("L")}` });
  if (one.dots || one.points.length === 1)
    for (const point of one.points)
      make(frame, "circle", { class: `dot s${index}`, cx: px(point[0]), cy: py(point[1]), r: 3.5 });
  for (const lost of one.lost ?? []) {
    const cross = `M${px(lost) - 4},${bottom - 10}l8,8m0,-8l-8,8`;
    make(frame, "path", { class: `lost s${index}`, d: cross });
  }
}

/** What the series have at x, the best first. */
function valuesAt(chart, series, x) {
  const found = [];
  for (const one of series) {
    const point = (one.points ?? []).find((p) => p[0] === x);
    if (point) found.push({ id: one.id, value: point[1], text: point[3] });
    else if ("level" in one) found.push({ id: one.id, value: one.level, text: one.text });
    else if ((one.lost ?? []).includes(x)) found.push({ id: one.id, value: NaN, text: "diverged" });
  }
  const rank = (value) => (Number.isNaN(value) ? Infinity : -chart.better * value);
  return found.sort((a, b) => (rank(a.value) < rank(b.value) ? -1 : 1));
}

/** One chart: its figure, redrawn on demand, with a cursor that follows pointer and arrow keys. */
function addChart(parent, chart, legend, off) {
  const figure = make(parent, "figure");
  make(figure, "figcaption", {}, chart.title);
  const plot = make(figure, "div", { class: "plot" });
  const svg = make(plot, "svg", { role: "img", tabindex: 0, "aria-label": `${chart.title} by ${chart.x}` });
  const tip = make(plot, "div", { class: "tip", role: "status" });
  const styles = Object.fromEntries(legend.map((entry) => [entry.id, entry.style]));
  const names = Object.fromEntries(legend.map((entry) => [entry.id, entry.label]));
  let drawn, place = -1;
  const visible = () => chart.series.filter((one) => !off.has(one.id));

  function hide() {
    tip.hidden = true;
    place = -1;
    drawn?.cursor.setAttribute("visibility", "hidden");
  }
  function show(next) {
    place = Math.max(0, Math.min(drawn.xs.length - 1, next));
    const x = drawn.xs[place], values = valuesAt(chart, visible(), x);
    if (!values.length) return hide();
    const position = drawn.px(x), scale = svg.clientWidth / drawn.width;
    for (const end of ["x1", "x2"]) drawn.cursor.setAttribute(end, position);
    drawn.cursor.setAttribute("visibility", "visible");
    tip.replaceChildren();
    make(tip, "b", {}, `${chart.x} ${label(x)}`);
    for (const { id, text } of values) {
      const row = make(tip, "div");
      make(row, "i", { class: `s${styles[id]}` });
      make(row, "span", {}, names[id]);
      make(row, "b", {}, text);
    }
    tip.hidden = false;
    const right = position * scale + 12, room = plot.clientWidth - tip.offsetWidth;
    const left = right <= room ? right : Math.min(room, right - 24 - tip.offsetWidth);
    tip.style.left = `${Math.max(0, left)}px`;
  }
  function nearest(event) {
    const at = (event.clientX - svg.getBoundingClientRect().left) * drawn.width / svg.clientWidth;
    const distances = drawn.xs.map((x) => Math.abs(drawn.px(x) - at));
    show(distances.indexOf(Math.min(...distances)));
  }
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    show(place < 0 ? drawn.xs.length - 1 : place + step);
  });
  return () => {
    drawn = draw(chart, svg, visible(), styles);
    hide();
  };
}

/** The charts that share a legend: a button switches a method in all of them. */
function addGroup(element) {
  const group = JSON.parse(element.querySelector("script").textContent);
  const off = new Set(), redraws = [];
  const redraw = () => redraws.forEach((one) => one());
  const bar = make(element, "div", { class: "legend", role: "group", "aria-label": "methods shown" });
  const buttons = group.legend.map((entry) => {
    const button = make(bar, "button", { type: "button", "data-id": entry.id });
    const swatch = make(button, "svg", { viewBox: "0 0 30 10", "aria-hidden": true });
    make(swatch, "path", { class: `curve s${entry.style} d${entry.style}`, d: "M0,5H30" });
    make(button, "span", {}, entry.label);
    if (entry.setting) make(button, "small", {}, ` ${entry.setting}`);
    button.addEventListener("click", () => {
      if (!off.delete(entry.id)) off.add(entry.id);
      update();
    });
    return button;
  });
  const all = make(bar, "button", { type: "button", class: "all" }, "show all");
  all.addEventListener("click", () => { off.clear(); update(); });
  function update() {
    for (const button of buttons) button.setAttribute("aria-pressed", !off.has(button.dataset.id));
    all.hidden = !off.size;
    redraw();
  }
  const grid = make(element, "div", { class: "grid" });
  for (const chart of group.charts) redraws.push(addChart(grid, chart, group.legend, off));
  grid.append(...element.querySelectorAll(".help"));
  update();
  let width = grid.clientWidth;
  new ResizeObserver(() => {
    if (grid.clientWidth !== width) { width = grid.clientWidth; redraw(); }
  }).observe(grid);
}

document.querySelectorAll(".charts").forEach(addGroup);

// Paper has no folds.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const fold of folded) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of folded) fold.open = false; });
