/* The header's menu on a phone. The same on the service's pages and on the Hub's. */
(function () {
  "use strict";

  // The style sheet hides the menu on a phone only where a button can show it.
  document.documentElement.classList.add("scripted");

  document.addEventListener("DOMContentLoaded", function () {
    const button = document.getElementById("menu");
    const pages = document.getElementById("pages");
    if (!button || !pages) {
      return;
    }
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
  });
})();
