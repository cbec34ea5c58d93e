/* The shell of every page: the theme, the menu on a phone, instants in the reader's own time zone. */
(function () {
  "use strict";

  // As the Hub's own pages: the theme chosen there, else the system's (which the style sheet follows).
  try {
    const theme = localStorage.getItem("jupyterhub-bs-theme");
    if (theme === "light" || theme === "dark") {
      document.documentElement.setAttribute("data-bs-theme", theme);
    }
  } catch (error) {
    // Storage is switched off: then the system's theme.
  }

  // The style sheet hides the menu on a phone only where a button can show it.
  document.documentElement.classList.add("scripted");

  document.addEventListener("DOMContentLoaded", function () {
    localise(document);
    openAndClose(document.getElementById("menu"), document.getElementById("pages"));
  });

  // Made once: a long page has a thousand instants.
  const time = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit" });
  const dayAndTime = new Intl.DateTimeFormat([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  const yearToo = new Intl.DateTimeFormat([], { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  const whole = new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "long" });

  /** Show instants in the reader's own time zone; the day, and the year, only where it is another one. */
  function localise(root) {
    const now = new Date();
    const begins = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
    const ends = new Date(now.getFullYear(), now.getMonth(), now.getDate() + 1).getTime();
    for (const element of root.querySelectorAll("time")) {
      const at = Date.parse(element.dateTime);
      const sameYear = new Date(at).getFullYear() === now.getFullYear();
      element.textContent = (at >= begins && at < ends ? time : sameYear ? dayAndTime : yearToo).format(at);
      element.title = whole.format(at);
    }
  }

  /** The menu of pages, on a phone. */
  function openAndClose(button, pages) {
    function set(open) {
      pages.classList.toggle("open", open);
      button.setAttribute("aria-expanded", String(open));
    }
    button.addEventListener("click", function () {
      set(!pages.classList.contains("open"));
    });
    document.addEventListener("keydown", function (event) {
      if (event.key === "Escape" && pages.classList.contains("open")) {
        set(false);
        button.focus();
      }
    });
  }

  window.fgpu = { localise: localise };
})();
