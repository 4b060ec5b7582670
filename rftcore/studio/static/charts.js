// Curves: data-chart names JSON {"title", "x", "series": [{"label", "x": [...], "y": [...]}]}; series may have different x.
const COLOURS = ["#3d4ed8", "#c2410c", "#15803d", "#a21caf", "#0e7490", "#854d0e"];

async function draw(place) {
  const answer = await fetch(place.dataset.chart, { headers: { Accept: "application/json" } });
  if (!answer.ok) return;
  const { x = "", series } = await answer.json();
  const tables = series.map((each) => [each.x, each.y]);
  const data = tables.length ? uPlot.join(tables) : [[]];
  const text = getComputedStyle(place).color;
  const axis = { stroke: text, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
  const options = {
    width: place.clientWidth, height: Number(place.dataset.height || 260), scales: { x: { time: false } },
    axes: [{ ...axis, label: x }, axis],
    series: [{ label: x || "x" }, ...series.map((each, i) => ({
      label: each.label, stroke: COLOURS[i % COLOURS.length], dash: i > 2 ? [6, 3] : undefined, width: 2, spanGaps: true,
    }))],
    hooks: { setCursor: [(chart) => { place.dataset.index = chart.cursor.idx ?? ""; }] },
  };
  place.replaceChildren();
  const chart = new uPlot(options, data, place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: options.height })).observe(place);
}

for (const place of document.querySelectorAll("[data-chart]")) {
  draw(place);
  place.addEventListener("live", () => draw(place));
}
