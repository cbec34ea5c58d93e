/**
 * Notifications of the browser itself, for a hidden tab.
 */

/** Return whether the user has allowed notifications of this site. */
export function canNotify(): boolean {
  return window.Notification?.permission === 'granted';
}

/** Return whether the user has neither allowed nor refused them. */
export function canRequestPermission(): boolean {
  return window.Notification?.permission === 'default';
}

/** Let the browser ask its user; browsers allow it only after a key or a button was pressed. */
export async function requestPermission(): Promise<void> {
  await window.Notification?.requestPermission();
}

/** Show a notification; a click leads to this tab. One with the same `tag` replaces it. */
export function showBrowserNotification(text: string, tag: string): void {
  try {
    const shown = new window.Notification(text, { tag });
    shown.onclick = () => {
      window.focus();
      shown.close();
    };
  } catch {
    // On phones only service workers may; Lab shows it when the tab is visible again.
  }
}
