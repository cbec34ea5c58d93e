/* The shell of every page: the theme, instants in the reader's own time zone. */
(function () {
  "use strict";

  // The Hub's own pages keep the theme there; without one it is the system's, which the style sheet follows.
  const THEME = "jupyterhub-bs-theme";
  const root = document.documentElement;

  function showTheme(theme) {
    if (theme === "light" || theme === "dark") {
      root.setAttribute("data-bs-theme", theme);
    }
  }
  try {
    showTheme(localStorage.getItem(THEME));
  } catch (error) {
    // Storage is switched off: then the system's theme.
  }

  function turnTheme() {
    const theme = (root.dataset.bsTheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark" ? "light" : "dark";
    showTheme(theme);
    try {
      localStorage.setItem(THEME, theme);
    } catch (error) {
      // Then for this page only.
    }
  }

  document.addEventListener("DOMContentLoaded", function () {
    localise(document);
    document.getElementById("dark-theme-toggle").addEventListener("click", turnTheme);
  });

  // Made once: a long page has a thousand instants.
  const time = new Intl.DateTimeFormat([], { hour: "numeric", minute: "2-digit" });
  const dayAndTime = new Intl.DateTimeFormat([], { day: "numeric", month: "short", hour: "numeric", minute: "2-digit" });
  const yearToo = new Intl.DateTimeFormat([], { year: "numeric", month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });
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

  window.fgpu = { localise: localise };
})();
