// Curves: data-chart names JSON {"x", "series": [{"label", "x": [...], "y": [...], "faint", "points", "low", "high", "colour"}]}; series may have
// different x. With data-step, a click on a step opens its page. A line below the picture reads the values, as a person with a screen reader needs it.
const COLOURS = ["#4757e6", "#c2410c", "#15803d", "#a21caf", "#0e7490", "#854d0e"];
const charts = new WeakMap();

// Vertical lines from the low to the high end of each value.
function errorBars(chart, series) {
  const { ctx } = chart;
  series.forEach((each, i) => {
    if (!each.low || !chart.series[i + 1].show) return;
    ctx.save();
    ctx.strokeStyle = chart.series[i + 1]._stroke;
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    each.x.forEach((x, k) => {
      const left = Math.round(chart.valToPos(x, "x", true));
      ctx.moveTo(left, chart.valToPos(each.low[k], "y", true));
      ctx.lineTo(left, chart.valToPos(each.high[k], "y", true));
    });
    ctx.stroke();
    ctx.restore();
  });
}

// Runs differ by colour, or the series of one run do; the series of a run among several differ by dashes. A faint series is that of the next one.
function line(each, i, all) {
  const before = all.slice(0, i).filter((other) => !other.faint && other.colour === each.colour).length;
  const colour = COLOURS[(each.colour ?? before) % COLOURS.length];
  return {
    label: each.label, stroke: each.faint ? `${colour}55` : colour, width: each.faint ? 1 : 2, spanGaps: true,
    dash: each.colour === null || each.faint || !before ? undefined : before === 1 ? [8, 4] : [2, 4], points: { show: Boolean(each.points) || each.x.length < 3, size: 6 },
    value: (_, value) => (value == null ? "–" : Number(value.toPrecision(4)).toString()),
  };
}

// Room for the error bars, and for a curve that is flat.
function range(low, high, series) {
  const least = Math.min(low ?? 0, ...series.flatMap((each) => each.low || []));
  const most = Math.max(high ?? 1, ...series.flatMap((each) => each.high || []));
  const margin = 0.06 * (most - least || Math.abs(most) || 1);
  return [least - margin, most + margin];
}

// A click opens the step under it; a drag, which enlarges a part of the curve, does not.
function openSteps(chart, address) {
  let pressed = 0;
  chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  chart.over.addEventListener("click", (event) => {
    const index = chart.cursor.idx;
    if (index != null && Math.abs(event.clientX - pressed) < 4) location.assign(address + Math.max(1, chart.data[0][index]));
  });
}

function options(place, x, series) {
  const text = getComputedStyle(place).color;
  const axis = { stroke: text, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" }, font: "12px system-ui" };
  return {
    width: place.clientWidth, height: Number(place.dataset.height || 260), scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high, series) } },
    axes: [{ ...axis, label: x, labelSize: 20, labelFont: "12px system-ui", size: 34 }, { ...axis, size: 56 }],
    series: [{ label: x || "x" }, ...series.map(line)],
    cursor: { drag: { click: () => {} } }, // its own filter takes clicks at fractions of a pixel for drags
    hooks: { draw: [(chart) => errorBars(chart, series)], ready: [(chart) => place.dataset.step && openSteps(chart, place.dataset.step)] },
  };
}

async function draw(place) {
  const answer = await fetch(place.dataset.chart, { headers: { Accept: "application/json" } });
  if (!answer.ok) return;
  const { x = "", series } = await answer.json();
  const shape = JSON.stringify(series.map((each) => each.label));
  const data = series.length ? uPlot.join(series.map((each) => [each.x, each.y])) : [[]];
  const known = charts.get(place);
  // Error bars are drawn from the series of the first picture, so a picture with them is made anew.
  if (known?.shape === shape && !series.some((each) => each.low)) return known.chart.setData(data);
  known?.chart.destroy();
  place.replaceChildren();
  if (!series.length) return void (place.textContent = place.dataset.empty || "");
  const chart = new uPlot(options(place, x, series), data, place);
  if (!known) new ResizeObserver(() => charts.get(place)?.chart.setSize({ width: place.clientWidth, height: chart.height })).observe(place);
  charts.set(place, { chart, shape });
}

for (const place of document.querySelectorAll("[data-chart]")) {
  draw(place);
  place.addEventListener("live", () => draw(place));
}

// <select data-submit>: its form is sent at once; without scripts there is its button.
for (const select of document.querySelectorAll("select[data-submit]")) select.addEventListener("change", () => select.form.submit());
