/* The shell of every page of the service: the theme. */
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
    document.getElementById("dark-theme-toggle").addEventListener("click", turnTheme);
  });
})();
