const { startWords, when } = window.fgpu;
const api = new JHAPI(window.jhdata.base_url);
// The stream tells of a cancelled spawn's end, too: then this page waits for the answer, and not reloads.
let cancelling = false, over = false, queued = false, named = root.dataset.server || "Your session";

function nth(n) {
  const last = n % 10, teen = n % 100 > 10 && n % 100 < 14;
  return n + (teen ? "th" : last === 1 ? "st" : last === 2 ? "nd" : last === 3 ? "rd" : "th");
}
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
/** Write a text where it is another: what is written again is read aloud again. */
function write(place, text) {
  if (place.textContent !== text) { place.textContent = text; }
}
/** Show a fact with its heading, or neither where there is none. */
function fact(id, text) {
  const there = text !== null && text !== undefined;
  for (const part of root.querySelectorAll("#" + id + ", [data-of=" + id + "]")) { part.hidden = !there; }
  write(by(id + "-text") || by(id), text || "");
}
function showPull(pull) {
  fact("fgpu-pull", pull ? pull.text : null);
  const bar = by("fgpu-pull-bar");
  bar.hidden = !pull || !pull.bytes_total;
  if (!bar.hidden) {
    bar.max = pull.bytes_total;
    bar.value = pull.bytes_done;
  }
}
function show(event) {
  if (event.progress !== undefined) { by("progress-bar").style.width = event.progress + "%"; }
  const f = event.fgpu, waiting = Boolean(f) && f.state === "PENDING";
  // The place stands above it.
  const said = waiting && f.position && f.text ? sentence(f.text) : event.message;
  if (said) { write(by("progress-message"), said); }
  if (!f) { return; }
  const place = !waiting || !f.position ? "" : f.position === 1 ? "Next in the queue" : nth(f.position) + " in the queue";
  write(by("fgpu-name"), f.name);
  if (root.dataset.server) { named = f.name; }
  document.title = (place || (waiting ? "Waiting" : "Starting")) + (root.dataset.server ? " \u2013 " + named : "");
  write(by("fgpu-title"), waiting ? "Waiting in the queue" : "Your session is starting");
  write(by("fgpu-stays"), waiting ? "you keep your place, and the session starts when your GPU share is free." : "the session starts anyway.");
  queued = waiting;
  by("fgpu-place").hidden = !place;
  // How far a start is, and not how near a place in the queue is.
  by("progress-bar").parentElement.hidden = waiting;
  write(by("fgpu-place"), place);
  by("fgpu-simulated").hidden = !f.simulated;
  by("fgpu-facts").hidden = false;
  fact("fgpu-amount", f.amount);
  fact("fgpu-first", f.waits_for && f.waits_for.replace(/^starts /, ""));
  fact("fgpu-sooner", f.sooner && f.sooner.replace(/^starts /, ""));
  showPull(f.pull);
  fact("fgpu-start", !waiting ? null : f.expected_start_at_s === null
    ? (f.basis || "no estimate") : startWords(f) + ", from " + f.basis + (f.behind_s ? ", as of " + f.behind_s + " s ago" : ""));
  fact("fgpu-since", when(f.submitted_at_s));
  waitsAs = place ? f.session_id : null;
  if (place) { askLess(); } else { by("fgpu-less").hidden = true; }
}

by("stop-server-btn").hidden = false;
by("stop-server-btn").addEventListener("click", function () {
  const status = by("stop-server-status");
  this.disabled = true;
  this.textContent = "Cancelling";
  status.hidden = true;
  cancelling = true;
  // The Hub's own page always cancels the default server; this one cancels the one it is about.
  server("stop").then(() => { window.location = root.dataset.sessions; }, (xhr) => {
    cancelling = false;
    if (over) { askAgain(); }
    this.disabled = false;
    this.textContent = "Cancel";
    status.hidden = false;
    status.className = "alert alert-danger";
    status.textContent = "Cancelling failed: " + whyNot(xhr);
  });
});

// A Hub that has just started knows no named server until its request is taken up again: only if that stays so it is gone.
const MISSING_MOST = 45;
let missing = 0;
function notifyOfStart() {
  notify("Your session is ready", named + " has started.");
}
function notifyOfNoStart(message) {
  notify("Your session did not start", message || named + " could not be started.");
}
/** Go where the Hub sends this page: to the session, or to where one logs in. What tells of progress knows which. */
async function redirected() {
  try {
    const answer = await fetch(root.dataset.progress, {
      headers: { Accept: "text/event-stream" }, credentials: "same-origin", cache: "no-store",
      signal: AbortSignal.timeout(5000)
    });
    if (answer.ok && /"ready": ?true/.test(await answer.text())) { notifyOfStart(); }
  } catch (error) {
    // Then nothing is told.
  }
  window.location.reload();
}

// The Hub may restart while this page is open: then the stream breaks and this page asks until the Hub has
// taken the request up again (it renders this page), the session runs (it redirects), or has ended.
function askAgain() {
  if (cancelling) { return; }
  const options = { credentials: "same-origin", cache: "no-store", redirect: "manual" };
  fetch(window.location.href, options).then(async function (answer) {
    if (answer.type === "opaqueredirect") {
      await redirected();
      return;
    }
    const text = await answer.text();
    const mark = /id="fgpu-(waiting|failed|over)"/.exec(text);
    if (mark) {
      if (mark[1] !== "waiting") { notifyOfNoStart(); }
      window.location.reload();
    } else if (answer.status === 404 && answer.headers.has("X-JupyterHub-Version") && ++missing > MISSING_MOST) {
      window.location = root.dataset.sessions;
    } else {
      setTimeout(askAgain, 2000);
    }
  }).catch(function () { setTimeout(askAgain, 2000); });
  write(by("progress-message"), "The Hub is restarting. " + (queued ? "You keep your place in the queue" : "Your session goes on"));
  document.title = "The Hub is restarting";
}

/** Show that the request has ended: it has no place in the queue, and cannot be cancelled. */
function showEnd() {
  document.title = "Ended";
  write(by("fgpu-title"), "This request has ended");
  write(by("progress-message"), "Finding out why");
  for (const id of ["fgpu-place", "fgpu-facts", "fgpu-less", "stop-server-btn", "fgpu-tell"]) { by(id).hidden = true; }
  for (const id of ["fgpu-stays", "progress-bar"]) { by(id).parentElement.hidden = true; }
}

/** Wait until the Hub's page gives the reason, also after another user's cancel; a deleted server has no page. */
function whatBecame(tries) {
  fetch(window.location.href, { credentials: "same-origin", cache: "no-store" }).then(async function (answer) {
    const text = await answer.text();
    if (answer.status > 501) {
      askAgain();
    } else if (answer.status === 404) {
      window.location = root.dataset.sessions;
    } else if (/id="fgpu-(failed|last-word)"/.test(text) || tries === 0) {
      window.location.reload();
    } else {
      setTimeout(whatBecame, 500, tries - 1);
    }
  }).catch(askAgain);
}

function told(event) {
  if (!cancelling && event.failed) { showEnd(); } else if (!cancelling) { show(event); }
  if (event.ready || event.failed) {
    over = true;
    if (cancelling) { return; }
    if (event.ready) {
      notifyOfStart();
    } else {
      notifyOfNoStart(event.message);
      whatBecame(10);
      return;
    }
    window.location.reload();
  }
}

// Read by hand, and not as an EventSource: when the Hub dies, its proxy keeps the stream open and silent,
// and only the bytes that the Hub sends every 8 s, which are no events, tell that it lives.
const SILENT_MS = 12000;
async function follow() {
  const abort = new AbortController();
  let heard = Date.now(), text = "";
  const watch = setInterval(() => { if (Date.now() - heard > SILENT_MS) { abort.abort(); } }, 1000);
  try {
    const answer = await fetch(root.dataset.progress, {
      headers: { Accept: "text/event-stream" }, credentials: "same-origin", cache: "no-store", signal: abort.signal
    });
    const reader = answer.ok ? answer.body.pipeThrough(new TextDecoderStream()).getReader() : null;
    for (let part = reader && await reader.read(); part && !part.done; part = await reader.read()) {
      heard = Date.now();
      const lines = (text + part.value).split("\n");
      text = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) { told(JSON.parse(line.slice(5))); }
      }
    }
  } catch (error) {
    // The stream has broken; what follows is the same as after its end.
  }
  clearInterval(watch);
  if (!over) { over = true; setTimeout(askAgain, 1000); }
}
follow();
window._jupyterhub_page_loaded = true;
