// What would start now in place of what waits: the service says it for the ticket in this page.
const { count: ignored, ...asked } = JSON.parse(root.dataset.request);
const LESS_EVERY_MS = 60000, OLD_MS = 3600e3, RETRY_MS = 1000, START_TRIES = 30;
let waitsAs = null, lessAsked = 0;

/** Return the service's forecast for other amounts, as if this request were gone; null where there is none. */
async function forecastOf(options) {
  const query = new URLSearchParams({ instead_of: waitsAs });
  for (const [name, value] of Object.entries(options)) {
    for (const one of [value].flat()) {
      if (one !== null) { query.append(name, one); }
    }
  }
  try {
    const answer = await fetch(root.dataset.sessions + "api/v1/forecast?" + query, {
      credentials: "same-origin", headers: { "X-FGPU-Ticket": root.dataset.ticket }, signal: AbortSignal.timeout(5000)
    });
    if (answer.status === 401 && performance.now() > OLD_MS) { window.location.reload(); }
    return answer.ok ? await answer.json() : null;
  } catch (error) {
    return null;
  }
}
/** Return the options that would start now, and their amount in words; null where none would, or that is unknown. */
function lessOf(f) {
  const { memory_gib: typed, ...same } = asked;
  if (f && f.beside_now) {
    const { cpu, memory_mib, memory_gib } = f.beside_now;
    return { options: { ...same, cpu, memory_mib }, words: cpu + (cpu === "1" ? " core" : " cores") + " and " + memory_gib + " GiB" };
  }
  if (!f || !f.largest_now || Number(f.largest_now) >= Number(asked.fgpu)) { return null; }
  const { cpu, memory_mib } = f.beside_other, { gpu_memory_mib, compute_percent, ...by_fgpu } = same;
  return { options: { ...by_fgpu, fgpu: f.largest_now, cpu, memory_mib }, words: f.largest_now + " fGPU" };
}
async function askLess() {
  if (waitsAs === null || document.hidden || cancelling || Date.now() - lessAsked < LESS_EVERY_MS) { return; }
  lessAsked = Date.now();
  const less = lessOf(await forecastOf(asked));
  if (cancelling) { return; }
  by("fgpu-less").hidden = !less;
  if (less) {
    write(by("fgpu-less-take"), "Start with " + less.words + " now");
    by("fgpu-less-take").onclick = () => takeLess(less);
  }
}
function lessFailed(text) {
  cancelling = false;
  by("fgpu-less-take").disabled = by("stop-server-btn").disabled = false;
  by("stop-server-status").hidden = false;
  by("stop-server-status").className = "alert alert-danger";
  by("stop-server-status").textContent = text;
}
const server = (how, options) => new Promise((success, error) => {
  const own = { ...options, success, error };
  if (root.dataset.server) {
    api[how + "_named_server"](root.dataset.user, root.dataset.server, own);
  } else {
    api[how + "_server"](root.dataset.user, own);
  }
});
const whyNot = (xhr) => (xhr.responseJSON && xhr.responseJSON.message) || xhr.statusText || "the Hub does not answer";
/** Give up the place for a smaller request that starts now. Ask once more first: the place cannot be restored. */
async function takeLess(less) {
  cancelling = true;
  by("fgpu-less-take").disabled = by("stop-server-btn").disabled = true;
  by("stop-server-status").hidden = true;
  const now = await forecastOf(less.options);
  if (!now || !now.starts_now) {
    by("fgpu-less").hidden = true;
    lessFailed((now ? less.words + " can't start now." : "The queue's service does not answer.") + " You keep your place.");
    if (over) { askAgain(); }
    return;
  }
  try {
    await server("stop");
  } catch (xhr) {
    lessFailed("Cancelling failed: " + whyNot(xhr));
    if (over) { askAgain(); }
    return;
  }
  for (let tries = START_TRIES; ; tries--) {
    try {
      await server("start", { data: JSON.stringify(less.options) });
      break;
    } catch (xhr) {
      // The request may still be on its way out.
      if (tries && /pending|already running/.test(whyNot(xhr))) {
        await new Promise((done) => setTimeout(done, RETRY_MS));
        continue;
      }
      by("fgpu-less").hidden = true;
      lessFailed("Your request was cancelled, and " + less.words + " did not start: " + whyNot(xhr) + ".");
      return;
    }
  }
  window.location.reload();
}
setInterval(askLess, LESS_EVERY_MS);
document.addEventListener("visibilitychange", askLess);
