/* Reloads an administrators' page regularly while it is visible, and never while it is in use. */
(function () {
  "use strict";

  const EVERY_MS = 10000;

  /** Return whether something on the page is being written, read aloud or about to be pressed. */
  function isInUse(main) {
    if (main.querySelector("[role=alert], .chart:hover")) {
      return true;
    }
    const active = document.activeElement;
    if (active && active !== main && main.contains(active)) {
      return true;
    }
    const selected = document.getSelection();
    if (selected && !selected.isCollapsed) {
      return true;
    }
    return [...main.querySelectorAll("input, textarea")].some((field) => field.value !== field.defaultValue);
  }

  async function refresh() {
    const main = document.getElementById("main");
    if (document.hidden || isInUse(main)) {
      return;
    }
    try {
      const token = document.querySelector("meta[name=xsrf]").content;
      const answer = await fetch(location.pathname + location.search, { headers: { "X-XSRFToken": token } });
      if (!answer.ok || answer.redirected) {
        return;
      }
      const found = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
      if (found && !isInUse(main)) {
        window.fgpu.localise(found);
        main.replaceChildren(...found.childNodes);
        document.dispatchEvent(new Event("fgpu-refreshed"));
      }
    } catch (error) {
      // What is there stays, until the service answers again.
    }
  }

  document.addEventListener("DOMContentLoaded", function () {
    setInterval(refresh, EVERY_MS);
    document.addEventListener("visibilitychange", refresh);
  });
})();
