/* The sessions page: only the lines that have changed are shown again. It works without this, too. */
(function () {
  "use strict";

  const METERS_MS = 10000;
  const MINUTE_MS = 60000;
  const PULL_MS = 3000;
  const TYPED_MS = 250;
  const AT_ONCE = 100;
  const LOOK_AGAIN_MS = 100;
  // Longer than anybody presses: a mark that a browser forgot to take away must not hold the page for ever.
  const PRESSED_AT_MOST_MS = 30000;

  const root = document.getElementById("live");
  const table = document.getElementById("table");
  const rows = document.getElementById("rows");
  const choose = document.getElementById("choose");
  const everybody = root.dataset.everybody === "1";
  let pulled = null;

  function address(more) {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(more)) {
      query.set(name, value);
    }
    return "?" + query;
  }

  /** Ask what there is now, and then for the lines that are others than those on the page. */
  async function ask(get) {
    const found = await get(address({ part: "1" }));
    if (found === null) {
      return;
    }
    for (const [id, html] of Object.entries(found.parts)) {
      window.fgpu.show(document.getElementById(id), html);
    }
    table.hidden = found.rows.length === 0;
    choose.hidden = found.few;
    document.getElementById("tools").hidden = found.total === 0;
    const lines = new Map(Array.from(rows.children, function (line) { return [line.id, line]; }));
    const wanted = found.rows.filter(function ([id, digest]) {
      const line = lines.get("session-" + id);
      return !line || line.dataset.digest !== digest;
    });
    for (let first = 0; first < wanted.length; first += AT_ONCE) {
      const ids = wanted.slice(first, first + AT_ONCE).map(function ([id]) { return id; });
      const fresh = await get(address({ part: "rows", ids: ids.join(",") }));
      if (fresh === null) {
        return;
      }
      for (const [id, html] of Object.entries(fresh.rows)) {
        lines.set("session-" + id, made(html));
      }
    }
    await untilReleased();
    // Who reads the details reads on.
    for (const line of rows.children) {
      lines.get(line.id).querySelector("details").open = line.querySelector("details").open;
    }
    arrange(found.rows.map(function ([id]) { return lines.get("session-" + id); }).filter(Boolean));
    showTimeLeft();
    // No event tells how far an image is.
    clearTimeout(pulled);
    pulled = rows.querySelector(".pull") && !document.hidden ? setTimeout(page.now, PULL_MS) : null;
  }

  /** Wait while something in a line is pressed: a button that is made again under the finger is not clicked. */
  async function untilReleased() {
    const deadline = Date.now() + PRESSED_AT_MOST_MS;
    while (rows.querySelector(":active") && Date.now() < deadline) {
      await new Promise(function (resolve) { setTimeout(resolve, LOOK_AGAIN_MS); });
    }
  }

  function made(html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html.trim();
    window.fgpu.localise(fresh.content);
    return fresh.content.firstElementChild;
  }

  /** Put the lines in this order; those that are in their place are not touched. */
  function arrange(wanted) {
    const focused = rows.contains(document.activeElement) ? document.activeElement.id : "";
    const kept = new Set(wanted);
    for (const line of Array.from(rows.children)) {
      if (!kept.has(line)) {
        line.remove();
      }
    }
    let at = rows.firstElementChild;
    for (const line of wanted) {
      if (line === at) {
        at = at.nextElementSibling;
      } else {
        rows.insertBefore(line, at);
      }
    }
    if (document.activeElement.id !== focused) {
      window.fgpu.focusAgain(focused);
    }
  }

  // --- What is used now ---

  function showMeters(meters) {
    for (const cell of rows.querySelectorAll(".use")) {
      const meter = meters[cell.dataset.id];
      if (meter) {
        showMeter(cell, meter);
      }
    }
  }

  function showMeter(cell, meter) {
    const fresh = document.getElementById("use-template").content.cloneNode(true);
    const used = meter.memory_used_mib;
    const limit = meter.memory_limit_mib;
    const sm = meter.sm_percent;
    const share = meter.compute_entitled_percent;
    fill(fresh.querySelector(".memory"), used, limit, gib(used) + " of " + gib(limit) + " GiB" + own(meter.memory_context_mib));
    const of = share === null ? " % of GPU" : Math.round(sm) > share ? " %" : " of " + share + " %";
    fill(fresh.querySelector(".compute"), sm, share ?? 100, Math.round(sm) + of);
    fresh.querySelector(".lent").textContent = lentNow(sm, share, meter.compute_lent_percent);
    fresh.querySelector(".trouble").textContent = meter.trouble || "";
    cell.replaceChildren(fresh);
  }

  /** As `lent_now` of the service. */
  function lentNow(sm, share, lent) {
    if (sm === null || lent === null) {
      return "";
    }
    const more = Math.round(sm) - share;
    return more > 0 ? share + " % share + " + more + " % borrowed" : Math.round(lent) ? "others use " + Math.round(lent) + " % of it" : "";
  }

  /** As `context_words` of the service. */
  function own(mib) {
    return mib ? ", " + gib(mib) + " of it contexts and code" : "";
  }

  /** As `gib_words` of the service: nothing changes when the page looks again. */
  function gib(mib) {
    return mib % 128 === 0 ? String(mib / 1024) : Math.max(0.1, mib / 1024).toFixed(1).replace(/[.]0$/, "");
  }

  /** One bar; what is not measured has none. */
  function fill(bar, part, whole, words) {
    if (part === null) {
      bar.remove();
      return;
    }
    bar.querySelector(".bar-text").textContent = words;
    bar.querySelector(".fill").setAttribute("width", whole > 0 ? Math.min(100, (100 * part) / whole).toFixed(1) : 0);
  }

  async function askMeters() {
    if (document.hidden || !rows.querySelector(".badge.running")) {
      return;
    }
    try {
      const answer = await fetch(page.prefix + "api/v1/meters" + (everybody ? "?all=1" : ""), { headers: page.headers });
      if (answer.ok) {
        const { meters } = await answer.json();
        showMeters(meters);
        // No event tells that a session becomes idle.
        if (Object.keys(meters).some(function (id) {
          const line = document.getElementById("session-" + id);
          return line && line.dataset.parks !== String(meters[id].parks_at_s ?? "");
        })) {
          page.soon();
        }
      }
    } catch (error) {
      // What is said of a service that cannot be reached, the stream's own asking says.
    }
  }

  // --- How long is left ---

  function span(seconds) {
    const minutes = Math.max(0, Math.round(seconds / 60));
    return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
  }

  function showTimeLeft() {
    const now = Date.now() / 1000;
    for (const cell of rows.querySelectorAll("[data-since], [data-until]")) {
      cell.textContent = span(cell.dataset.since ? now - cell.dataset.since : cell.dataset.until - now);
    }
  }

  // --- What is chosen ---

  /** Go to another choice without leaving the page. */
  function go(query) {
    history.replaceState(null, "", location.pathname + query);
    page.now();
  }

  function chosen() {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(choose)) {
      if (value) {
        query.set(name, value);
      }
    }
    for (const name of ["group", "show"]) {
      const value = new URLSearchParams(location.search).get(name);
      if (value) {
        query.set(name, value);
      }
    }
    return "?" + query;
  }

  function chooseInPlace() {
    let typed = null;
    choose.addEventListener("submit", function (event) {
      event.preventDefault();
      go(chosen());
    });
    choose.addEventListener("input", function () {
      clearTimeout(typed);
      typed = setTimeout(function () { go(chosen()); }, TYPED_MS);
    });
    root.addEventListener("click", function (event) {
      const link = event.target.closest("a.sort");
      if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
        event.preventDefault();
        const query = new URL(link.href).searchParams;
        choose.elements.sort.value = query.get("sort") || "";
        choose.elements.order.value = query.get("order") || "";
        go("?" + query);
      }
    });
  }

  // --- Which columns are shown: kept in this browser ---

  const HIDDEN_AT_FIRST = ["cpu", "memory", "started"];
  const KEPT_AS = "fgpu-hidden-columns";

  function hiddenColumns() {
    try {
      const found = JSON.parse(localStorage.getItem(KEPT_AS));
      return Array.isArray(found) ? found : HIDDEN_AT_FIRST;
    } catch (error) {
      return HIDDEN_AT_FIRST;
    }
  }

  function chooseColumns() {
    const chooser = document.getElementById("chooser");
    const boxes = Array.from(chooser.querySelectorAll("input"));
    function show(hidden) {
      for (const box of boxes) {
        box.checked = !hidden.includes(box.name);
        table.classList.toggle("without-" + box.name, hidden.includes(box.name));
      }
    }
    chooser.hidden = false;
    show(hiddenColumns());
    chooser.addEventListener("change", function () {
      const hidden = boxes.filter(function (box) { return !box.checked; }).map(function (box) { return box.name; });
      show(hidden);
      try {
        localStorage.setItem(KEPT_AS, JSON.stringify(hidden));
      } catch (error) {
        // A browser that keeps nothing shows them until the page is left.
      }
    });
  }

  const page = window.fgpu.keepUpToDate(root, ask, function () { clearTimeout(pulled); });
  window.fgpu.keepInPlace(root, page);
  window.fgpu.askBeforeEnding(root, page);
  chooseInPlace();
  chooseColumns();
  showTimeLeft();
  setInterval(showTimeLeft, MINUTE_MS / 2);
  setInterval(askMeters, METERS_MS);
  document.addEventListener("visibilitychange", askMeters);
})();
