/* Draws the charts of the administrators' pages with uPlot (uplot/LICENSE). Times are in the reader's own zone. */
(function () {
  "use strict";

  const HEIGHT = 170;
  const HOUR_S = 3600, DAY_S = 24 * HOUR_S;
  const WAIT_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 345600];
  const COUNT_STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap((n) => [1, 2, 5].map((step) => step * 10 ** n));
  let drawn = [];

  /** Return the computed colour of a CSS variable: a canvas cannot read `light-dark()`. */
  function colour(name) {
    const probe = document.createElement("span");
    probe.style.color = "var(--" + name + ")";
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function duration(seconds) {
    const s = Math.round(seconds);
    if (s < 60) { return s + " s"; }
    if (s < HOUR_S) { return Math.round(s / 60) + " min"; }
    return s < DAY_S ? +(s / HOUR_S).toFixed(1) + " h" : +(s / DAY_S).toFixed(1) + " d";
  }

  function options(chart, width) {
    const zone = chart.utc ? { timeZone: "UTC" } : {};
    const day = new Intl.DateTimeFormat([], { day: "numeric", month: "short", ...zone });
    const weekday = new Intl.DateTimeFormat([], { weekday: "short", day: "numeric", ...zone });
    const hour = new Intl.DateTimeFormat([], { hour: "numeric", minute: "2-digit" });
    const moment = new Intl.DateTimeFormat([], { weekday: "short", hour: "numeric", minute: "2-digit" });
    const amount = new Intl.NumberFormat([], { maximumFractionDigits: 2 });
    const say = (value) => value === null ? "unknown" : chart.unit === "s" ? duration(value) : amount.format(value);
    const span = chart.starts.length * chart.length;
    const ticks = chart.length >= DAY_S ? day : span > 2 * DAY_S ? weekday : hour;
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const end = chart.starts[0] + span;
    // Where nothing is pointed at, the legend has the newest values.
    const newest = (plot) => { if (plot.cursor.idx == null) { plot.setLegend({ idx: chart.starts.length - 1 }); } };
    const line = (one, first) => ({
      label: one.name,
      stroke: colour(one.colour),
      fill: chart.kind === "bars" ? colour(one.colour) : first ? colour(one.colour).replace("rgb(", "rgba(").replace(")", ", .18)") : undefined,
      width: chart.kind === "bars" ? 0 : 2,
      points: { show: false },
      paths: chart.kind === "bars" ? uPlot.paths.bars({ align: 1, size: [0.8, 40] }) : uPlot.paths.stepped({ align: 1 }),
      value: (plot, value, series, index) => index === null ? "" : say(value),
    });
    return {
      width: width,
      height: HEIGHT,
      tzDate: chart.utc ? (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC") : undefined,
      cursor: { drag: { x: false, y: false }, y: false },
      hooks: { ready: [newest], setCursor: [newest] },
      scales: {
        x: { time: true, range: [chart.starts[0], end] },
        y: { range: (plot, least, most) => [0, Math.max(chart.top, most * 1.05 || 1)] },
      },
      series: [
        { label: "From", value: (plot, value) => value === null ? "" : (chart.utc ? day : moment).format(value * 1000) },
        ...chart.series.map((one, n) => line(one, n === 0)),
      ],
      axes: [
        { ...axis, size: 32, space: 64, incrs: ticks === hour ? undefined : [1, 2, 7, 14, 30, 91].map((days) => days * DAY_S), values: (plot, splits) => splits.map((at) => ticks.format(at * 1000)) },
        { ...axis, size: 56, incrs: chart.unit === "s" ? WAIT_STEPS_S : COUNT_STEPS, values: (plot, splits) => splits.map(say) },
      ],
    };
  }

  function draw() {
    for (const plot of drawn) {
      plot.destroy();
    }
    drawn = [...document.querySelectorAll(".chart")].map(function (place) {
      const chart = JSON.parse(place.dataset.chart);
      const last = (values) => chart.kind === "steps" ? [...values, values[values.length - 1]] : values;
      const starts = chart.kind === "steps" ? [...chart.starts, chart.starts[chart.starts.length - 1] + chart.length] : chart.starts;
      return new uPlot(options(chart, place.clientWidth), [starts, ...chart.series.map((one) => last(one.values))], place);
    });
  }

  document.addEventListener("DOMContentLoaded", function () {
    draw();
    let width = innerWidth;
    addEventListener("resize", function () {
      if (innerWidth !== width) {
        width = innerWidth;
        draw();
      }
    });
    // The theme's button, the system's theme, and a page that was read again.
    new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-bs-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    document.addEventListener("fgpu-refreshed", draw);
  });
})();
