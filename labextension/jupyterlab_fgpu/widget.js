// The live view of `GPUWidget(backend="anywidget")`: one module, without anything beside it. It asks the Jupyter
// server by itself, so that the kernel has nothing to do, and only while somebody can see it.
const EVERY_MS = 10000;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 48;

/** Ask the server's extension for what a panel shows; rejects where there is no answer. */
async function read(signal) {
  const config = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
  const base = new URL(config.baseUrl ?? "/", document.baseURI).href.replace(/\/*$/, "/");
  const xsrf = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie)?.[1];
  const answer = await fetch(`${base}fgpu/api/status?details=1&no_track_activity=1`, {
    credentials: "same-origin",
    headers: xsrf ? { "X-XSRFToken": decodeURIComponent(xsrf) } : {},
    signal
  });
  if (!answer.ok) {
    throw new Error(`This Jupyter server gives no current status (${answer.status}).`);
  }
  return answer.json();
}

// Always as text: names may hold anything.
function add(parent, name, text, attributes = {}) {
  const node = document.createElement(name);
  if (text !== undefined) {
    node.textContent = text;
  }
  for (const [key, value] of Object.entries(attributes)) {
    node.setAttribute(key, value);
  }
  parent.append(node);
  return node;
}

function plot(parent, points, most, label) {
  const known = points.filter((p) => p.value !== null);
  if (known.length < 2 || !(most > 0)) {
    return;
  }
  const first = points[0].at_s;
  const span = Math.max(1, points[points.length - 1].at_s - first);
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({
    role: "img",
    "aria-label": label,
    viewBox: `0 -1 ${WIDTH} ${HEIGHT + 2}`,
    width: WIDTH,
    height: HEIGHT
  })) {
    svg.setAttribute(key, value);
  }
  svg.style.border = "1px solid var(--jp-border-color2, gray)";
  const line = document.createElementNS(SVG, "polyline");
  const text = known.map((p) => {
    const x = (WIDTH * (p.at_s - first)) / span;
    return `${x.toFixed(1)},${(HEIGHT - (HEIGHT * Math.min(p.value, most)) / most).toFixed(1)}`;
  });
  line.setAttribute("points", text.join(" "));
  line.setAttribute("fill", "none");
  line.style.stroke = "var(--jp-brand-color1, currentColor)";
  svg.append(line);
  const figure = add(parent, "figure", undefined, { style: "margin: 4px 0" });
  figure.append(svg);
  add(figure, "figcaption", label);
}

function row(table, label, value) {
  const line = add(table, "tr");
  add(line, "th", label, { scope: "row", style: "text-align: left; vertical-align: top" });
  add(line, "td", value, { style: "text-align: left" });
}

function draw(node, status) {
  node.replaceChildren();
  const { session, details } = status;
  if (!session) {
    add(node, "p", status.hub_message ?? "This server has no share of a GPU.");
    return;
  }
  const meter = session.meter ?? {};
  const used = session.gpu_memory_used_mib ?? meter.memory_used_mib ?? "not known";
  const table = add(node, "table");
  add(table, "caption", "GPU share", { style: "text-align: left; font-weight: 600" });
  row(table, "Amount", `${session.amount ?? "not known"}${session.simulated ? " (simulated)" : ""}`);
  row(table, "GPU memory", `${used} / ${session.gpu_memory_mib ?? "not known"} MiB`);
  const computed = meter.sm_percent == null ? null : Math.round(meter.sm_percent);
  const entitled = meter.compute_entitled_percent ?? session.compute_percent;
  row(
    table,
    "Compute",
    (computed == null ? "use not known" : `${computed} % in use`) +
      (entitled == null ? ", not limited" : `, your share is ${entitled} %`) +
      (meter.compute_lent_percent == null || !(computed > entitled) ? "" : ` (${computed - entitled} % borrowed)`)
  );
  const waiting = status.others.filter((other) => other.state === "PENDING");
  const queue = status.queue.length === null ? "not known" : `${status.queue.length} waiting`;
  const mine = waiting.map((other) => `${other.display_name}: number ${other.position ?? "?"}`);
  row(table, "Queue", [queue, ...mine].join("; "));
  const points = details?.history?.points ?? [];
  const of = (name) => points.map((p) => ({ at_s: p.at_s, value: p[name] }));
  plot(node, of("memory_used_mib"), session.gpu_memory_mib, "GPU memory, last minutes, of the limit");
  plot(node, of("sm_percent"), 100, "Compute, last minutes, of the GPU");
  if (details?.processes.length) {
    const processes = add(node, "table");
    add(processes, "caption", "GPU memory by process", { style: "text-align: left" });
    for (const one of details.processes) {
      const name = one.notebook ?? `${one.name ?? "process"} (${one.pid})`;
      row(processes, name, one.memory_mib === null ? "not known" : `${one.memory_mib} MiB`);
    }
  }
}

export default {
  render({ el }) {
    const node = add(el, "section", undefined, { "aria-label": "GPU share", class: "jp-fgpu-Widget" });
    add(node, "p", "Loading…");
    const stop = new AbortController();
    const refresh = async () => {
      if (document.hidden || !node.isConnected || node.offsetParent === null) {
        return;
      }
      try {
        draw(node, await read(stop.signal));
      } catch (error) {
        if (!stop.signal.aborted) {
          node.replaceChildren();
          add(node, "p", error.message);
        }
      }
    };
    const timer = setInterval(refresh, EVERY_MS);
    // It is put into the page after this.
    setTimeout(refresh, 0);
    return () => {
      clearInterval(timer);
      stop.abort();
    };
  }
};
