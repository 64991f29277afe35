"""The routes of the project."""

from django.urls import path

from sample_apps.django_reports import views

urlpatterns = [
    path("", views.index, name="index"),
    path("reports/<int:pk>/sign", views.sign, name="sign"),
    path("unsafe/reports/<int:pk>/sign", views.sign_without_lock),
]
